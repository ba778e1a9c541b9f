"""Measures a profile: a layer, embedding and output layer on every rank, and the job's messages between the ranks.

each rank on its core     a layer of one tensor-parallel shard, without a group ──measure_layer──> both halves
                          a layer with experts, over the expert-parallel group ──measure_layer───> its half, and an exchange
   (all at once, as       embedding, and output layer with loss, of the same shard ──measure_block──> seconds
    in training)          messages over the job's groups and links ──measure_links──> points
                          AdamW on the CPU, on all ranks and on one ──measure_adam───> rate of an optimizer on the host
one rank, alone           tiny layers under every setting ──measure_alone───────> host time
parent                    the slowest rank's figures ──> Profile
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from megatron_lynx.anatomy import Section
from megatron_lynx.config.cluster import HostAdam, HostTime
from megatron_lynx.config.experts import Experts
from megatron_lynx.config.job import Job
from megatron_lynx.config.parallel import Parallel
from megatron_lynx.doctor import Links
from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.kinds.experts.section import FUSED
from megatron_lynx.kinds.opaque.section import OPAQUE
from megatron_lynx.kinds.planning import NO_SECONDS, planning_of
from megatron_lynx.measure.measurement import this_machine
from megatron_lynx.profiler.measured import (
    TeLayer,
    held_bytes,
    measure_interference,
    measure_layer,
    measure_links,
    messages_of,
    recompute_like,
    shard_arguments,
    slowest,
)
from megatron_lynx.profiler.profile import BlockProfile, HalfProfile, LinkPoint, Profile, Source, shape_of
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.profiler.timing import InnerNorm, measure_block
from megatron_lynx.runtime.device import device_for, present_device
from megatron_lynx.runtime.saved import edges_between
from megatron_lynx.testbed.cpu_device import stood_in_for, transformer_engine_can_run
from megatron_lynx.testbed.fusions import fused_gradient_fields, fused_gradients, fusions_of, give_main_gradients
from megatron_lynx.testbed.host_time import measure_alone
from megatron_lynx.testbed.ranks import Hosts
from megatron_lynx.version import __version__

REPETITIONS = 9

HOST_ROUNDS = 6
"""Turns per setting of the host time, most of a profile's time."""


@dataclass(frozen=True)
class RankFigures:
    halves: dict[str, HalfProfile]
    """By `Section.profiled_as`."""
    embedding: BlockProfile
    head: BlockProfile
    links: tuple[LinkPoint, ...]
    interference: float
    adam: HostAdam | None
    """Unknown (None), as is the host time, if a stand-in computes part of the layers."""

    @property
    def layer_s(self) -> float:
        return sum(half.forward_s + half.backward_s for half in self.halves.values())


def measure_profile(job: Job, hosts: Hosts, announce: Callable[[str], AbstractContextManager[object]]) -> Profile:
    """Measure a job's profile on this machine. Raises errors of the ranks, and `ConfigError` if its layers cannot be built."""
    check_measurable(job)
    machine, missing, host_time = this_machine(hosts.links, hosts.device), stood_in_for(job), None
    with announce("measuring a layer and the links"):
        figures: list[RankFigures] = hosts.run(measure_rank, job, REPETITIONS)
        if missing is None:
            [layers] = replace(hosts, ranks=1).run(measure_alone, job.model.implementation, HOST_ROUNDS, unshaped=True)
            host_time = HostTime(cpu=machine.cpu, adam=figures[0].adam, **{job.model.implementation: layers})
    slowest = max(figures, key=lambda rank: rank.layer_s)
    experts = [half for rank in figures if (half := rank.halves.pop("experts", None)) is not None]
    fullest = max(experts, key=lambda half: (half.saved_bytes, half.forward_s + half.backward_s), default=None)
    source = Source(
        how="measured",
        machine=f"{machine.gpu or machine.cpu}, {machine.cores} cores",
        made_by=f"megatron-lynx {__version__}, torch {machine.torch}, megatron-core {machine.megatron_core}",
        repetitions=REPETITIONS,
        interconnect=hosts.description if hosts.device == "cpu" else f"{hosts.description}; {Links.of_machine().in_words}",
        stood_in_for=missing,
        fusions=fusions_of(job),
    )
    return Profile(
        source=source,
        shape=shape_of(job),
        **slowest.halves,
        experts=fullest,
        opaque={
            opaque.kind: HalfProfile(input_bytes=0, items=dict.fromkeys(OPAQUE[opaque.kind].names, NO_SECONDS), tensors=())
            for opaque in job.model.opaque
        },
        links=figures[0].links,
        embedding=slowest.embedding,
        head=slowest.head,
        interference=max(rank.interference for rank in figures),
        host_time=host_time,
    )


def measure_rank(rank: int, job: Job, repetitions: int) -> RankFigures:
    from megatron_lynx.testbed.groups import initialise

    with fused_gradients(job):
        halves, embedding, head, device = _of_one_layer(job, repetitions)
        if job.model.experts is not None:
            halves["experts"] = of_experts(job, job.model.experts.one_after_the_other, repetitions)
    initialise(job)
    links = _messages(job, device, repetitions)
    interference = _interference(job, links, device, repetitions)
    adam = measure_adam(rank, device) if stood_in_for(job) is None else None
    return RankFigures(halves, embedding, head, links, interference, adam)


def _of_one_layer(job: Job, repetitions: int) -> tuple[dict[str, HalfProfile], BlockProfile, BlockProfile, torch.device]:
    """Measure both halves of a layer, embedding and output layer without a group; also return their device."""
    from megatron_lynx.testbed.training import synthetic_batches

    alone = _alone(job)
    chunk = _chunk(job, alone)
    hidden = _rows(alone, chunk)
    sequence_shards = job.parallel.tensor if job.parallel.sequence_parallel else 1
    sections = job.model.halves.values()
    halves = _measured(job, chunk, hidden, sections, repetitions, _arguments(alone), sequence_shards)
    batch = synthetic_batches(alone)[0]

    def embed() -> torch.Tensor:
        return chunk.embedding(input_ids=batch.tokens, position_ids=batch.position_ids)  # type: ignore[no-any-return]

    def head_of(fresh_input: Callable[[], torch.Tensor]) -> torch.Tensor:
        weight = chunk.shared_embedding_or_output_weight() if job.model.tied_embeddings else None
        logits, _ = chunk.output_layer(chunk.decoder.final_layernorm(fresh_input().requires_grad_()), weight=weight)
        return chunk.compute_language_model_loss(batch.labels, logits)  # type: ignore[no-any-return]

    embedding = _end(job, repetitions, timed=embed, counted=embed)
    head = _end(job, repetitions, timed=partial(head_of, hidden.detach), counted=partial(head_of, hidden.clone))
    return halves, embedding, head, hidden.device


def of_experts(job: Job, experts: Experts, repetitions: int) -> HalfProfile:
    """Measure a half with experts over its expert-parallel ranks: seconds at the stated load, bytes at the held one."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    alone = _alone(job, experts=experts.model_copy(update={"layers": "all", "shared_beside": False}), ranks=job.parallel.expert)
    chunk = _chunk(job, alone, moe_grouped_gemm=job.model.uses_te and torch.cuda.is_available())
    hidden = _rows(alone, chunk, job.parallel.tensor if job.parallel.sequence_parallel else 1)
    router = chunk.decoder.layers[0].mlp.router
    gating, rows = router.gating, hidden.shape[0] * hidden.shape[1]
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1, device=hidden.device))  # as schedules do: its own has another shape

    def loaded(load: float, repetitions: int) -> HalfProfile:
        chosen = chosen_experts(experts, rows, job.parallel.expert, load).to(hidden.device)

        def decided(given: torch.Tensor) -> torch.Tensor:
            logits = gating(given)
            return logits + CHOSEN * chosen.view(logits.shape).to(logits.dtype)  # type: ignore[no-any-return]

        router.gating = decided
        return _measured(job, chunk, hidden, [experts.section], repetitions)[experts.section.profiled_as]

    half = loaded(experts.load, repetitions)
    if experts.held_load != experts.load:
        held = loaded(experts.held_load, 1)
        sizes = {name: {"saved_bytes": item.saved_bytes} for name, item in held.items.items()}
        items = {name: item.model_copy(update=sizes[name]) for name, item in half.items.items()}
        half = half.model_copy(update={"items": items, "tensors": held.tensors})
    rate = job.fused_dispatch.computing_kept if experts.shared_beside else 0.0
    alone_s = {"exchange_s": 0.0} if job.parallel.expert == 1 else {}
    return half.model_copy(update={"shared_rate": rate, **alone_s})


CHOSEN = 64.0
"""Added to the logit of an expert that a token shall choose."""


def chosen_experts(experts: Experts, tokens: int, ranks: int, load: float) -> torch.Tensor:
    """Return for each token (row) 1 where it chooses an expert (column). The first rank's experts get `load` times the mean."""
    local, each = experts.count // ranks, experts.per_token
    first = min(round(load * tokens * each / ranks), tokens * min(local, each))
    columns: list[int] = []
    for token in range(tokens):
        near = [first * number // tokens for number in (token, token + 1)]
        far = [each * number - done for number, done in zip((token, token + 1), near, strict=True)]
        columns += [choice % local for choice in range(*near)]
        columns += [local + choice % (experts.count - local) for choice in range(*far)]
    return torch.zeros(tokens, experts.count).scatter(1, torch.tensor(columns).view(tokens, each), 1.0)


def _alone(job: Job, *, experts: Experts | None = None, ranks: int = 1) -> Job:
    """Return a job of one layer and one shard's vocabulary without tensor and pipeline groups, one micro-batch per rank."""
    changes = {"layers": 1, "vocab": job.model.vocab // job.parallel.tensor, "experts": experts}
    batch = job.batch.model_copy(update={"global_": job.batch.micro * job.gpus})
    model = job.model.model_copy(update=changes)
    return job.model_copy(update={"model": model, "parallel": Parallel(expert=ranks), "batch": batch})


def _chunk(job: Job, alone: Job, **fields: Any) -> Any:
    from megatron_lynx.testbed.groups import initialise
    from megatron_lynx.testbed.tiny_models import build_model

    initialise(alone)
    whole = build_model(alone, **fused_gradient_fields(job), **shard_arguments(job), **fields)[0]
    chunk = getattr(whole, "module", whole)
    give_main_gradients(job, chunk)
    return chunk


def _rows(alone: Job, chunk: Any, shards: int = 1) -> torch.Tensor:
    parameter = next(chunk.parameters())
    shape = (alone.model.seq // shards, alone.batch.micro, alone.model.hidden)
    return torch.randn(shape, dtype=parameter.dtype, device=parameter.device)


def _measured(
    job: Job,
    chunk: Any,
    hidden: torch.Tensor,
    sections: Iterable[Section],
    repetitions: int,
    arguments: dict[str, Any] | None = None,
    sequence_shards: int = 1,
) -> dict[str, HalfProfile]:
    from megatron_lynx.apply.hooks.sites import places_of

    layer = chunk.decoder.layers[0]
    sites = {section: places_of(section, layer, te=job.model.uses_te) for section in sections}
    measured = measure_layer(
        layer,
        hidden,
        arguments or {},
        device_for(hidden.device),
        sites=sites,
        sequence_shards=sequence_shards,
        repetitions=repetitions,
        te=te_layer(job, layer, sites),
    )
    return {section.profiled_as: measured[section.half] for section in sites}


def _arguments(job: Job) -> dict[str, Any]:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    if job.model.position != "rope" or job.model.latent is not None:  # latent attention makes its own
        return {}
    rotary = RotaryEmbedding(job.model.head_size, 1.0, use_cpu_initialization=True)
    return {"rotary_pos_emb": rotary(job.model.seq)}


def _end(job: Job, repetitions: int, *, timed: Callable[[], torch.Tensor], counted: Callable[[], torch.Tensor]) -> BlockProfile:
    """Measure the embedding or output layer: bytes with a fresh input, which counts, and seconds without making one."""
    shards = job.parallel.tensor if job.parallel.sequence_parallel else 1
    saved = held_bytes(counted, job.model.hidden, shards)
    return measure_block(timed, present_device(), repetitions).model_copy(update={"saved_bytes": saved})


def _messages(job: Job, device: torch.device, repetitions: int) -> tuple[LinkPoint, ...]:
    """Measure a quarter, half and all of each message size, over the group that sends it."""
    from megatron.core import parallel_state

    points: list[LinkPoint] = []
    for kind, size in messages_of(job).items():
        pipeline, tensor = parallel_state.get_pipeline_model_parallel_group, parallel_state.get_tensor_model_parallel_group
        group = pipeline() if kind == "p2p" else tensor()  # the only rank's own without tensor parallelism
        points += measure_links((kind,), (size // 4, size // 2, size), group, device, repetitions)
    return tuple(points)


def _interference(job: Job, links: tuple[LinkPoint, ...], device: torch.device, repetitions: int) -> float:
    """Return the slowdown of computation during a collective; 1 without tensor parallelism, which has no windows."""
    from megatron.core import parallel_state

    longest = max((point for point in links if point.kind not in ("p2p", "host")), key=lambda point: point.seconds, default=None)
    if longest is None:
        return 1.0
    group = parallel_state.get_tensor_model_parallel_group()
    return measure_interference(recompute_like(job, device), longest, group, device, repetitions)


def check_measurable(job: Job) -> None:
    """Raise `ConfigError` for layers that cannot be measured. Ranks have the same import path."""
    elsewhere = "plan for a described cluster: seconds and bytes then follow from shapes"
    problems = [Problem(f"job: {key}", found, needed, elsewhere) for key, found, needed in _unmeasured(job)]
    if job.model.uses_te and not transformer_engine_can_run():
        install = "install it with its compiled part; without a GPU docs/models.md says what a checkout can do"
        needed = "Transformer Engine on the import path"
        problems.append(Problem("job: model.implementation", job.model.implementation, needed, install))
    if problems:
        raise ConfigError("these layers cannot be measured here", problems)


def _unmeasured(job: Job) -> Iterator[tuple[str, str, str]]:
    """Yield (key, found, needed) of settings under which a layer cannot be measured."""
    model, parallel, experts = job.model, job.parallel, job.model.experts
    if parallel.context > 1:
        yield "parallel.context", str(parallel.context), "1: a layer is measured without its exchange"
    if experts is not None:
        if parallel.expert_tensor_size > 1:
            yield "parallel.expert_tensor", str(parallel.expert_tensor_size), "1: experts are measured whole"
        if experts.shared_ffn and parallel.tensor > 1:
            found = f"{parallel.tensor} with shared experts"
            yield "parallel.tensor", found, "1: they are measured without their collectives"
        if experts.drops:
            yield "model.experts.drops", "true", "false: the measured layers drop no token"
        if experts.latent is not None:
            yield "model.experts.latent", str(experts.latent), "none: the measured layers route the residual stream"
        if experts.dispatcher in FUSED and importlib.util.find_spec("deep_ep") is None:
            yield "model.experts.dispatcher", experts.dispatcher, "DeepEP on the import path (deep_ep), or alltoall"
    for opaque in (each for each in model.opaque if not each.nothing):
        yield "model.opaque", opaque.kind, "attention, MLP or experts"
    if model.latent is not None and model.latent.sparse is not None:
        yield "model.latent.sparse", "an indexer", "none"
    if model.fp8 is not None:
        yield "model.fp8", str(model.fp8_recipe), "none"
    if model.adapters is not None:
        yield "model.adapters", ", ".join(model.adapted), "none"


def te_layer(job: Job, layer: Any, sections: Iterable[Section]) -> TeLayer | None:
    """Return the profiler's facts; None for local layers. Raises `HookRefused` for unknown releases of Transformer Engine."""
    if not job.model.uses_te:
        return None
    norms, flops, shape = {}, dict[str, int](), LayerShape.of(job)
    for section in sections:
        norms[section.half] = inner_norms(layer, section)
        flops |= planning_of(section).flops(shape)
    return TeLayer(norms, flops, job.model.fp8 is not None)


def inner_norms(layer: Any, section: Section) -> dict[str, InnerNorm]:
    linears = {item: attrgetter(item.path)(layer) for item in section.items if item.is_linear}
    normed = {item: linear for item, linear in linears.items() if hasattr(linear, "layer_norm_weight")}
    return {item.name: _inner_norm(layer.config, linear, item.norm_inside or section.norm) for item, linear in normed.items()}


def _inner_norm(config: Any, linear: Any, norm: str) -> InnerNorm:
    from megatron.core.extensions.transformer_engine import TENorm

    from megatron_lynx.apply.transformer_engine import norm_inside

    inside = norm_inside(linear, norm)
    alone = TENorm(config, hidden_size=linear.layer_norm_weight.numel(), eps=config.layernorm_epsilon)

    def saved(outputs: Any, arguments: Any) -> Any:
        return inside.saved([node for node, _ in edges_between(outputs, arguments)])

    return InnerNorm(norm, inside.run, saved, alone)


ELEMENTS = 2**23
"""With gradient and moments 128 MiB, more than caches hold."""
STEPS = 4


def measure_adam(rank: int, device: torch.device) -> HostAdam:
    """Return the slowest rank's rate while all step, since an update waits for it, and rank 0's alone. `device`: of the group."""
    parameter = torch.nn.Parameter(torch.zeros(ELEMENTS, device="cpu"))
    parameter.grad = torch.ones(ELEMENTS, device="cpu")
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, fused=True)
    optimizer.step()  # allocates its state

    def step_s() -> float:
        seconds = []
        for _ in range(STEPS):
            begin = time.perf_counter()
            optimizer.step()
            seconds.append(time.perf_counter() - begin)
        return min(seconds)

    world = torch.distributed.group.WORLD
    assert world is not None, "groups are made"
    torch.distributed.barrier()
    together_s = slowest(step_s(), world, device)
    alone_s = min(step_s(), together_s) if rank == 0 else together_s
    torch.distributed.barrier()
    alone, together = (round(ELEMENTS / 1e6 / seconds, 1) for seconds in (alone_s, together_s))
    ranks = f"{torch.distributed.get_world_size()} ranks of {torch.get_num_threads()} threads"
    made_by = f"megatron-lynx {__version__}, torch {torch.__version__}, {ranks}, least of {STEPS} steps"
    return HostAdam(made_by=made_by, alone_million_per_s=alone, together_million_per_s=together)
