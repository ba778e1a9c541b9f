"""What a number of GPUs allows: the parts of the run, the smallest first."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from megatron_lynx.apply.releases import minor_of
from megatron_lynx.apply.transformer_engine import KNOWN
from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan
from megatron_lynx.planner import uniform_plan
from megatron_lynx.testbed.schedules import Way
from megatron_lynx.testbed.tiny_jobs import tiny_job
from scripts.gpu_check.copies import copies
from scripts.gpu_check.machine import Machine
from scripts.gpu_check.part import Part
from scripts.gpu_check.trial import Setting, trial
from scripts.gpu_check.without_flushes import two_versions
from tests.transparency.deferring import deferring
from tests.transparency.offloaded import offloading
from tests.transparency.plans import plan_for, replayable

SIZE = {"hidden": 1024, "ffn": 4096, "heads": 16, "vocab": 32_000, "seq": 512}
LARGE = {"hidden": 8192, "ffn": 32_768, "heads": 64, "kv_groups": 64, "vocab": 32_000, "seq": 2048, "micro": 1}
"""Of what runs on GPUs. A dry run has the sizes of `tiny_job`."""
DELAY_S = {"trial": 0.003, "large": 0.02, "dry": 0.002}
"""Of a collective: longer than a replay of such a layer takes."""
HOST_BYTES = {False: 2**28, True: 10**6}
"""What a chunk may send to the host, of each micro-batch; by whether this is a dry run."""
REDUCED = {"ddp": True, "overlap_grad_reduce": True, "optimizer": "megatron"}
FUSED = {"bias_dropout_fusion": True, "bias_activation_fusion": True, "gradient_accumulation_fusion": True}
COMPILED = {"TORCHDYNAMO_DISABLE": "0"}
STAGES = {"microbatches": 4}
PUT_OFF = "TP2, sequence parallel, weight gradients put off"
TE_PUT_OFF = "TP2, sequence parallel, Transformer Engine, weight gradients put off"
LOGGED = "; ranks wait for devices and each other behind each step, as with --log-interval 1"


def parts(machine: Machine) -> list[Part]:
    """All of them, also those that need more GPUs than there are: these are skipped by name."""
    made = _Parts(machine.dry)
    return [*made.of_one(), *made.of_two(), *made.of_four(), *made.of_eight()]


class _Parts:
    """Makes parts of one size."""

    def __init__(self, dry: bool) -> None:
        self._dry = dry

    def of_one(self) -> Iterator[Part]:
        for like in ("gpt", "llama"):
            yield self._trial(f"one rank, {like}", "everything is replayed on demand", self._job(like))
        env = {"LYNX_COMPILER": "aot_eager"} if self._dry else COMPILED
        shows = f"with Megatron's fusions, compiled{', as far as that needs no GPU' if self._dry else ''}"
        yield self._trial("fusions", shows, self._job("gpt"), env=env, model=FUSED, training={"ddp": True})
        yield self._te("Transformer Engine", "its layers, flash attention", self._te_job())
        alone = self._job("gpt", tensor=8, layers=2, **({"heads": 8, "kv_groups": 8} if self._dry else LARGE))
        yield self._trial("one rank of TP8", "replays behind emulated collectives", alone, ranks=1, alone=True, delay="large")
        copied = self._job("llama", layers=1, **({} if self._dry else LARGE))
        yield Part("copies", "copies to the host: rates, what a layer hides, order", 1, copies, (copied, self._dry))

    def of_two(self) -> Iterator[Part]:
        yield self._trial("TP2", "replays behind all-reduces", self._job("gpt", tensor=2))
        sharded: dict[str, Any] = {"tensor": 2, "sequence_parallel": True}
        yield self._trial("TP2, sequence parallel", "inputs gathered once", self._job("llama", **sharded))
        yield self._te("TP2, sequence parallel, Transformer Engine", "windows of its collectives", self._te_job(**sharded))
        deferred: dict[str, Any] = {"defers": True, "model": FUSED, "training": {"ddp": True}}
        shows = "weight gradients in waits, beside replays"
        yield self._trial(PUT_OFF, shows, self._job("gpt", **sharded), **deferred)
        yield self._te(TE_PUT_OFF, shows, self._te_job(**sharded), **deferred)
        stages = self._job("gpt", pipeline=2, **STAGES)
        yield self._trial("PP2", "replays while gradients are awaited" + LOGGED, stages, synchronised=True)
        yield self._trial("PP2, offloading", "what is kept goes to the host", stages, offloads=True)
        chunks = self._job("gpt", pipeline=2, **STAGES, layers_per_chunk=1)
        yield self._trial("PP2, two chunks", "interleaved, gradients in streams of their own" + LOGGED, chunks, synchronised=True)
        replicas = self._job("gpt", replicas=2, distributed_optimizer=True)
        shows = "reductions in backward, parameters gathered in forward"
        training = {**REDUCED, "overlap_param_gather": True}
        yield self._trial("DP2, distributed optimizer", shows, replicas, training=training, compared="weights")
        yield from self._without_flushes(2)

    def of_four(self) -> Iterator[Part]:
        both: dict[str, Any] = {"tensor": 2, "pipeline": 2, **STAGES}
        yield self._trial("TP2 x PP2", "windows of both kinds" + LOGGED, self._job("gpt", **both), synchronised=True)
        sharded = self._job("llama", **both, sequence_parallel=True)
        yield self._trial("TP2 x PP2, sequence parallel, offloading", "gathered once, and copied", sharded, offloads=True)
        deep: dict[str, Any] = {"pipeline": 4, "microbatches": 8}
        yield self._trial("PP4", "four stages" + LOGGED, self._job("gpt", **deep), synchronised=True)
        chunks = self._job("gpt", **deep, layers=8, layers_per_chunk=1)
        yield self._trial("PP4, two chunks", "interleaved" + LOGGED, chunks, synchronised=True)
        replicas = self._job("gpt", tensor=2, replicas=2, distributed_optimizer=True)
        shows = "reductions of both kinds"
        yield self._trial("TP2 x DP2, distributed optimizer", shows, replicas, training=REDUCED, compared="weights")
        yield from self._without_flushes(4)

    def of_eight(self) -> Iterator[Part]:
        sharded = self._job("gpt", tensor=8, sequence_parallel=True, heads=8 if self._dry else 16, kv_groups=8)
        yield self._trial("TP8, sequence parallel", "one node", sharded)
        deep = self._job("llama", tensor=2, pipeline=4, sequence_parallel=True, microbatches=8)
        yield self._trial("TP2 x PP4, sequence parallel", "one node" + LOGGED, deep, synchronised=True)
        yield from self._without_flushes(8)

    # --- how they are made ---------------------------------------------------------------------------------------------

    def _job(self, like: Any, **fields: Any) -> Job:
        groups = {} if self._dry else {"kv_groups": SIZE["heads"] // (2 if like == "llama" else 1)}
        size = {} if self._dry else SIZE
        return tiny_job(like, **{"dtype": "bf16", **size, **groups, **fields})

    def _te_job(self, **layout: Any) -> Job:
        attention = "unfused" if self._dry else "flash"
        return self._job("llama", **layout, implementation="transformer_engine", attention=attention)

    def _trial(self, name: str, shows: str, job: Job, **options: Any) -> Part:
        ranks, env, lacking = options.pop("ranks", job.gpus), options.pop("env", {}), options.pop("lacking", _nothing)
        plan = plan_of(job)
        if options.pop("offloads", False):
            plan = offloading(plan_of(job, share=0.5), HOST_BYTES[self._dry])
        if options.pop("defers", False):
            plan = deferring(plan)
        delay = options.pop("delay", "trial")
        setting = Setting(job, plan, DELAY_S["dry" if self._dry else delay], **options)
        return Part(name, shows, ranks, trial, (setting,), env, lacking)

    def _te(self, name: str, shows: str, job: Job, **options: Any) -> Part:
        return self._trial(name, shows, job, lacking=_no_te, **options)

    def _without_flushes(self, stages: int) -> Iterator[Part]:
        for defers in (True, False):
            job = self._job("gpt", pipeline=stages, layers=max(4, stages), microbatches=2 * stages)
            job = job.model_copy(update={"schedule": "double_buffered", "defer_updates": defers})
            name = f"PP{stages}, double-buffered, updates {'deferred' if defers else 'at once'}"
            given = (job, Way("ours", defers=defers, plan=uniform_plan(job)))
            yield Part(name, "weights of the version rule, ranks wait behind each update", stages, two_versions, given)


def plan_of(job: Job, share: float = 1.0) -> Plan:
    """Everything that can be replayed is, in windows; or a share of it, drawn layer by layer."""
    draw, everything = random.Random(7), replayable(job, gather=True)
    return plan_for(job, lambda layer: [item for item in everything if draw.random() < share])


def _no_te(machine: Machine) -> str | None:
    if machine.te is None:
        return "Transformer Engine is not installed"
    if minor_of(machine.te) not in KNOWN:
        return f"Transformer Engine {machine.te} is not known; {', '.join(KNOWN)} are"
    return None


def _nothing(machine: Machine) -> str | None:
    return None
