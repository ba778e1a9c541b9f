"""A measured profile: one layer and the ends of the model on every rank, then the job's messages between the ranks.

each rank on its core     a layer of one tensor-parallel shard, without a group ──measure_layer──> both halves
   (all at once, as       embedding, and head with loss, of the same shard ──measure_block──> seconds
    in training)          messages over the job's own groups and links ──measure_links──> points
                          tiny layers under every setting ──measure_layers──────> host time
                          AdamW on the CPU, together and alone ──measure_adam───> of an optimizer on the host
parent                    the slowest rank's figures ──> Profile
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from megatron_lynx.anatomy import Half
from megatron_lynx.config.host_time import HostTime, LayerHostTime
from megatron_lynx.config.job import Job
from megatron_lynx.config.parallel import Parallel
from megatron_lynx.measure.machine import this_machine
from megatron_lynx.profiler.profile import BlockProfile, HalfProfile, LinkPoint, Profile, Source, shape_of
from megatron_lynx.runtime.device import device_for, present_device
from megatron_lynx.testbed.fusions import fusions_of
from megatron_lynx.testbed.host_adam import AdamFigures, adam_of_ranks, measure_adam
from megatron_lynx.testbed.hosts import Hosts
from megatron_lynx.version import __version__

REPETITIONS = 9

HOST_ROUNDS = 6
"""Turns of each setting whose host time is measured, which is most of what a profile takes."""


@dataclass(frozen=True)
class RankFigures:
    """What one rank measured."""

    halves: dict[Half, HalfProfile]
    embedding: BlockProfile
    head: BlockProfile
    links: tuple[LinkPoint, ...]
    interference: float
    host_time: LayerHostTime | None
    """None where a stand-in's kernels would be in it."""
    stood_in_for: str | None = None
    adam: AdamFigures | None = None

    @property
    def layer_s(self) -> float:
        return sum(half.forward_s + half.backward_s for half in self.halves.values())


def measure_profile(job: Job, hosts: Hosts, announce: Callable[[str], AbstractContextManager[object]]) -> Profile:
    """The profile of a job on this machine. Raises what the ranks raise, and `ConfigError` where its layers cannot be built."""
    from megatron_lynx.testbed.te_layer import check_measurable

    check_measurable(job)
    with announce("measuring a layer and the links"):
        figures: list[RankFigures] = hosts.run(measure_rank, job, REPETITIONS, HOST_ROUNDS)
    slowest = max(figures, key=lambda each: each.layer_s)
    machine = this_machine(hosts.links, hosts.device)
    source = Source(
        how="measured",
        machine=f"{machine.gpu or machine.cpu}, {machine.cores} cores",
        made_by=f"megatron-lynx {__version__}, torch {machine.torch}, megatron-core {machine.megatron_core}",
        repetitions=REPETITIONS,
        interconnect=hosts.description,
        stood_in_for=figures[0].stood_in_for,
        fusions=fusions_of(job),
    )
    return Profile(
        source=source,
        shape=shape_of(job),
        **slowest.halves,
        links=figures[0].links,
        embedding=slowest.embedding,
        head=slowest.head,
        interference=max(each.interference for each in figures),
        host_time=_host_time(job, figures, machine.cpu),
    )


def _host_time(job: Job, figures: list[RankFigures], cpu: str) -> HostTime | None:
    """That of the layers, with how fast the CPU steps parameters."""
    found = host_time_of_ranks(job, [each.host_time for each in figures if each.host_time is not None], cpu)
    adams = [each.adam for each in figures if each.adam is not None]
    return found if found is None or not adams else found.model_copy(update={"adam": adam_of_ranks(adams)})


def host_time_of_ranks(job: Job, measured: list[LayerHostTime], cpu: str) -> HostTime | None:
    """That of the ranks that takes longest; None where none was measured."""
    from megatron_lynx.testbed.host_time import slowest

    return HostTime(cpu=cpu, **{job.model.implementation: slowest(measured)}) if measured else None


def measure_rank(rank: int, job: Job, repetitions: int, host_rounds: int) -> RankFigures:
    """Runs inside `RankPool`, on all ranks of the job."""
    from megatron_lynx.testbed.fused_gradient import fused_gradients
    from megatron_lynx.testbed.groups import initialise
    from megatron_lynx.testbed.host_time import asked_by, measure_layers
    from megatron_lynx.testbed.te_layer import stood_in_for

    with fused_gradients(job):
        halves, embedding, head, device = _of_one_layer(job, repetitions)
    initialise(job)
    links = _messages(job, device, repetitions)
    interference, missing = _interference(job, links, device, repetitions), stood_in_for(job)
    host_time = measure_layers(rank, job.gpus, asked_by(job, host_rounds)) if missing is None else None
    adam = measure_adam(rank) if missing is None else None
    return RankFigures(halves, embedding, head, links, interference, host_time, missing, adam)


def _of_one_layer(job: Job, repetitions: int) -> tuple[dict[Half, HalfProfile], BlockProfile, BlockProfile, torch.device]:
    """Both halves of a layer and both ends of the model, without a group, and the device that they are on."""
    from megatron_lynx.profiler.measured import measure_layer, shard_arguments
    from megatron_lynx.testbed.fused_gradient import fused_gradient_fields, give_main_gradients
    from megatron_lynx.testbed.groups import initialise
    from megatron_lynx.testbed.te_layer import fp8_context, te_layer
    from megatron_lynx.testbed.tiny_models import build_model

    alone = _alone(job)
    initialise(alone)
    whole = build_model(alone, **fused_gradient_fields(job), **shard_arguments(job))[0]
    chunk = getattr(whole, "module", whole)
    give_main_gradients(job, chunk)
    hidden = _hidden(alone, chunk)
    sequence_shards = job.parallel.tensor if job.parallel.sequence_parallel else 1
    layer = chunk.decoder.layers[0]
    with fp8_context(job, layer):
        halves = measure_layer(
            layer,
            hidden,
            _arguments(alone),
            device_for(hidden.device),
            sections=job.model.halves.values(),
            sequence_shards=sequence_shards,
            repetitions=repetitions,
            te=te_layer(job, layer),
        )
    embedding = _end(job, repetitions, timed=_embedding(alone, chunk), counted=_embedding(alone, chunk))
    head = _end(job, repetitions, timed=_head(alone, chunk, hidden.detach), counted=_head(alone, chunk, hidden.clone))
    return halves, embedding, head, hidden.device


def _alone(job: Job) -> Job:
    """One layer, and one shard's share of the vocabulary, without tensor and pipeline groups; a micro-batch on each rank."""
    model = job.model.model_copy(update={"layers": 1, "vocab": job.model.vocab // job.parallel.tensor})
    batch = job.batch.model_copy(update={"global_": job.batch.micro * job.gpus})
    return job.model_copy(update={"model": model, "parallel": Parallel(), "batch": batch})


def _hidden(job: Job, chunk: Any) -> torch.Tensor:
    parameter = next(chunk.parameters())
    shape = (job.model.seq, job.batch.micro, job.model.hidden)
    return torch.randn(shape, dtype=parameter.dtype, device=parameter.device)


def _arguments(job: Job) -> dict[str, Any]:
    """What the block passes to each layer besides its input."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    if job.model.position != "rope" or job.model.latent is not None:  # which makes its own
        return {}
    rotary = RotaryEmbedding(job.model.head_size, 1.0, use_cpu_initialization=True)
    return {"rotary_pos_emb": rotary(job.model.seq)}


def _end(job: Job, repetitions: int, *, timed: Callable[[], torch.Tensor], counted: Callable[[], torch.Tensor]) -> BlockProfile:
    """One end of the model. It is counted with an input of its own, so that this counts, and timed without making one."""
    from megatron_lynx.profiler.measured import held_bytes, measure_block

    shards = job.parallel.tensor if job.parallel.sequence_parallel else 1
    saved = held_bytes(counted, job.model.hidden, shards)
    return measure_block(timed, present_device(), repetitions).model_copy(update={"saved_bytes": saved})


def _embedding(job: Job, chunk: Any) -> Callable[[], torch.Tensor]:
    from megatron_lynx.testbed.batches import synthetic_batches

    batch = synthetic_batches(job)[0]
    return lambda: chunk.embedding(input_ids=batch.tokens, position_ids=batch.position_ids)


def _head(job: Job, chunk: Any, hidden: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Final norm, output projection and loss, of what `hidden` makes."""
    from megatron_lynx.testbed.batches import synthetic_batches

    labels = synthetic_batches(job)[0].labels

    def run() -> torch.Tensor:
        weight = chunk.shared_embedding_or_output_weight() if job.model.tied_embeddings else None
        normed = chunk.decoder.final_layernorm(hidden().requires_grad_())
        logits, _ = chunk.output_layer(normed, weight=weight)
        loss: torch.Tensor = chunk.compute_language_model_loss(labels, logits)
        return loss

    return run


def _messages(job: Job, device: torch.device, repetitions: int) -> tuple[LinkPoint, ...]:
    """A quarter of each message, half, and the whole, over the group that sends it."""
    from megatron.core import parallel_state

    from megatron_lynx.profiler.links import measure_links, messages_of

    points: list[LinkPoint] = []
    for kind, size in messages_of(job).items():
        pipeline = kind == "p2p"
        group = (
            parallel_state.get_pipeline_model_parallel_group() if pipeline else parallel_state.get_tensor_model_parallel_group()
        )
        points += measure_links((kind,), (size // 4, size // 2, size), group, device, repetitions)
    return tuple(points)


def _interference(job: Job, links: tuple[LinkPoint, ...], device: torch.device, repetitions: int) -> float:
    """1 without tensor parallelism: nothing is under way then that a window could be of."""
    from megatron.core import parallel_state

    from megatron_lynx.profiler.links import measure_interference, replay_like

    longest = max((point for point in links if point.kind != "p2p"), key=lambda point: point.seconds, default=None)
    if longest is None:
        return 1.0
    group = parallel_state.get_tensor_model_parallel_group()
    return measure_interference(replay_like(job, device), longest, group, device, repetitions)
