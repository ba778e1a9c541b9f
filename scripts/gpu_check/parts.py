"""What a number of GPUs allows: the parts of the run, the smallest first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scripts.gpu_check.copies import copies, order, order_sanitized
from scripts.gpu_check.machine import Machine
from scripts.gpu_check.maker import (
    LARGE,
    SIDE,
    Maker,
    behind_exchanges,
    no_fp8,
    no_fused_gradients,
    no_sanitizer,
    plan_of,
    received_apart,
)
from scripts.gpu_check.part import Part
from tests.instruments.compiler import COMPILER
from tests.uniform import uniform_plan

REDUCED = {"ddp": True, "overlap_grad_reduce": True, "optimizer": "megatron"}
FUSED = {"bias_dropout_fusion": True, "bias_activation_fusion": True, "gradient_accumulation_fusion": True}
TRAINED = {"ddp": True, "optimizer": "megatron"}
GROUPED = {"moe_grouped_gemm": True}
TE = {"implementation": "transformer_engine"}
COMPILED = {"TORCHDYNAMO_DISABLE": "0"}
STAGES = {"microbatches": 4}
SANITIZED = "order of copies, compute-sanitizer"
PUT_OFF = "TP2, sequence parallel, weight gradients put off"
TE_PUT_OFF = "TP2, sequence parallel, Transformer Engine, weight gradients put off"
WITHIN = "one rank, offloading half by half"
LOGGED = "; ranks wait for devices and each other behind each step, as with --log-interval 1"


def parts(machine: Machine) -> list[Part]:
    """All of them, also those that need more GPUs than there are: these are skipped by name."""
    made = _Parts(machine)
    return [*made.of_one(), *made.of_two(), *made.of_four(), *made.of_eight()]


class _Parts(Maker):
    """By number of ranks."""

    def of_one(self) -> Iterator[Part]:
        for like in ("gpt", "llama"):
            yield self.part_of(f"one rank, {like}", "everything is recomputed on demand", self.job(like))
        yield self.part_of_te("Transformer Engine", "its layers, flash attention", self.te_job())
        shows = "what is kept goes to the host within a micro-batch, and comes back"
        yield self.part_of(WITHIN, shows, self.job("gpt"), offloads=True)
        yield self.part_of_te(f"{WITHIN}, Transformer Engine", shows, self.te_job(), offloads=True)
        yield from self._of_one_since()
        copied = self.job("llama", layers=1, **({} if self._dry else LARGE))
        yield Part("copies", "copies to the host: rates, what a layer hides", 1, copies, (copied, self._dry))
        yield Part("order of copies", "tests of device, copier and offload on this device", 1, order, (self._dry,))
        yield Part(SANITIZED, "the same, each access to memory checked", 1, order_sanitized, lacking=no_sanitizer)
        alone = self.job("gpt", tensor=8, layers=2, **({"heads": 8, "kv_groups": 8} if self._dry else LARGE))
        shows = "recomputations behind emulated collectives"
        yield self.part_of("one rank of TP8", shows, alone, ranks=1, apart=True, alone=True, delay="large")
        env = {COMPILER: "aot_eager"} if self._dry else COMPILED
        shows = f"with Megatron's fusions, compiled{', as far as that needs no GPU' if self._dry else ''}"
        yield self.part_of("fusions", shows, self.job("gpt"), env=env, model=FUSED, training={"ddp": True})

    def _of_one_since(self) -> Iterator[Part]:
        for recipe in ("delayed", "tensorwise"):
            job = self.te_job(fp8={"recipe": recipe})
            shows = "scales and recomputations"
            yield self.part_of_te(f"Transformer Engine, FP8, {recipe}", shows, job, lacking=no_fp8, training={"ddp": True})
        added: dict[str, Any] = {"model": {"gradient_accumulation_fusion": True}, "training": {"ddp": True}}
        shows = "weight gradients that it adds up in place"
        yield self.part_of("apex's fused gradients", shows, self.job("gpt"), lacking=no_fused_gradients, **added)
        yield self.part_of("experts", "local, an MLP for each", self.expert_job(), training=TRAINED)
        experts, shows = self.expert_job(**TE), "tokens of all experts in one GEMM"
        yield self.part_of_te("experts, Transformer Engine", shows, experts, model=GROUPED, training=TRAINED)
        latent = self.latent_job()
        yield self.part_of_te("latent attention", "local layers", latent, plan=uniform_plan(latent))
        latent = self.latent_job(**TE)
        yield self.part_of_te("latent attention, Transformer Engine", "its layers", latent, plan=uniform_plan(latent))

    def of_two(self) -> Iterator[Part]:
        yield self.ranks_meet(2)
        yield self.part_of("TP2", "recomputations behind all-reduces", self.job("gpt", tensor=2))
        sharded: dict[str, Any] = {"tensor": 2, "sequence_parallel": True}
        yield self.part_of("TP2, sequence parallel", "inputs gathered once", self.job("llama", **sharded))
        yield self.part_of_te("TP2, sequence parallel, Transformer Engine", "windows of its collectives", self.te_job(**sharded))
        deferred: dict[str, Any] = {"defers": True, "model": FUSED, "training": {"ddp": True}}
        shows = "weight gradients in waits, beside recomputations"
        yield self.part_of(PUT_OFF, shows, self.job("gpt", **sharded), **deferred)
        yield self.part_of_te(TE_PUT_OFF, shows, self.te_job(**sharded), **deferred)
        stages = self.job("gpt", pipeline=2, **STAGES)
        yield self.part_of("PP2", "recomputations while gradients are awaited" + LOGGED, stages, synchronised=True)
        yield self.part_of("PP2, offloading", "what is kept goes to the host", stages, offloads=True)
        chunks = self.job("gpt", pipeline=2, **STAGES, layers_per_chunk=1)
        yield self.part_of(
            "PP2, two chunks", "interleaved, gradients in streams of their own" + LOGGED, chunks, synchronised=True
        )
        replicas = self.job("gpt", replicas=2, distributed_optimizer=True)
        shows = "reductions in backward, parameters gathered in forward"
        training = {**REDUCED, "overlap_param_gather": True}
        yield self.part_of("DP2, distributed optimizer", shows, replicas, training=training, compared="weights")
        yield from self.without_flushes(2)
        spread = self.expert_job(replicas=2, expert=2)
        shows = "recomputations while tokens travel"
        yield self.part_of("EP2", shows, spread, plan=behind_exchanges(spread), training=TRAINED)
        spread = self.expert_job(replicas=2, expert=2, **TE)
        plan = behind_exchanges(spread)
        yield self.part_of_te("EP2, Transformer Engine", shows, spread, plan=plan, model=GROUPED, training=TRAINED)
        cut = self.job("gpt", context=2, context_exchange="all_gather")
        yield self.part_of("CP2", "sequences cut, an attention of the testbed's", cut, training=TRAINED)
        shows = "sequences cut, its attention in a ring"
        yield self.part_of_te("CP2, Transformer Engine", shows, self.te_job(context=2), training=TRAINED)
        stages, shows = self.te_job(pipeline=2, **STAGES), "what its layers keep goes to the host"
        yield self.part_of_te("PP2, Transformer Engine, offloading", shows, stages, offloads=True)

        yield from self._side_by_side()

    def _side_by_side(self) -> Iterator[Part]:
        size = {} if self._dry else SIDE
        wide = self.job("gpt", tensor=2, **size)
        yield self.side_by_side("TP2", wide, plan_of(wide))
        spread = self.expert_job(replicas=2, expert=2, **({} if self._dry else {**SIDE, "layers": 2}))
        yield self.side_by_side("EP2", spread, behind_exchanges(spread))

    def of_four(self) -> Iterator[Part]:
        yield self.ranks_meet(4)
        both: dict[str, Any] = {"tensor": 2, "pipeline": 2, **STAGES}
        yield self.part_of("TP2 x PP2", "windows of both kinds" + LOGGED, self.job("gpt", **both), synchronised=True)
        chunks, shows = self.job("gpt", **both, layers_per_chunk=1), "interleaved, gradients in other groups than Megatron's"
        yield self.part_of("TP2 x PP2, two chunks", shows + LOGGED, chunks, plan=received_apart(chunks), synchronised=True)
        sharded = self.job("llama", **both, sequence_parallel=True)
        yield self.part_of("TP2 x PP2, sequence parallel, offloading", "gathered once, and copied", sharded, offloads=True)
        sharded = self.te_job(**both, sequence_parallel=True)
        name = "TP2 x PP2, sequence parallel, Transformer Engine, offloading"
        yield self.part_of_te(name, "gathered once, and copied", sharded, offloads=True)
        deep: dict[str, Any] = {"pipeline": 4, "microbatches": 8}
        yield self.part_of("PP4", "four stages" + LOGGED, self.job("gpt", **deep), synchronised=True)
        chunks = self.job("gpt", **deep, layers=8, layers_per_chunk=1)
        yield self.part_of("PP4, two chunks", "interleaved" + LOGGED, chunks, synchronised=True)
        replicas = self.job("gpt", tensor=2, replicas=2, distributed_optimizer=True)
        shows = "reductions of both kinds"
        yield self.part_of("TP2 x DP2, distributed optimizer", shows, replicas, training=REDUCED, compared="weights")
        yield from self.without_flushes(4)

    def of_eight(self) -> Iterator[Part]:
        yield self.ranks_meet(8)
        sharded = self.job("gpt", tensor=8, sequence_parallel=True, heads=8 if self._dry else 16, kv_groups=8)
        yield self.part_of("TP8, sequence parallel", "one node", sharded)
        deep = self.job("llama", tensor=2, pipeline=4, sequence_parallel=True, microbatches=8)
        yield self.part_of("TP2 x PP4, sequence parallel", "one node" + LOGGED, deep, synchronised=True)
        interleaved = {"layers": 8, "layers_per_chunk": 1, "microbatches": 4 if self._dry else 8}
        chunks = self.job("llama", tensor=2, pipeline=4, sequence_parallel=True, **interleaved)
        name, shows = "TP2 x PP4, sequence parallel, two chunks", "interleaved, gradients in the group of all ranks"
        yield self.part_of(name, shows + LOGGED, chunks, plan=received_apart(chunks), synchronised=True)
        yield from self.without_flushes(8)
