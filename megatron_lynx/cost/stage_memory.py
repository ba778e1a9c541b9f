"""Everything that one device holds at its fullest, each byte under a name.

    parameters  gradients  optimizer       all the time
    activations                            what layers keep, all chunks in flight; with offloading, the share that stays
    staging                                with offloading: the offloaded shares of two chunks, on their way back (ping, pong)
    embedding                              first stage: dropout's masks
    head  logits                           last stage: what final norm and output projection read; the logits in fp32
    recomputed                             what one whole layer makes again, under `full`; the scores of one, under `selective`
    rest                                   workspaces, communication buffers, what one layer makes again under `balanced`, rows
                                           of tokens on their way to experts
    fp8_weights                            with FP8: copies of the linears' weights
    second_weights                         without flushes: the other version of the parameters
    second_gradients                       the same with deferred updates, on all stages but the first: the next batch's

Offloading a share r of every chunk's bytes C, N chunks in flight (Yuan et al., ATC '24):

    (N - 2)(1 - r)C   +   2C                            +   2rC
    out of reach          one is run, one still copied      ping and pong               =   (N - (N - 4)r)C

so four chunks or fewer gain nothing, and are not offloaded. On the last stage the logits exist only between the forward of its
last chunk and that chunk's backward. It is not offloaded, so no copy is under way then: one chunk is whole, not two.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from megatron_lynx.config.job import Job, Policy
from megatron_lynx.cost.in_flight import chunks_in_flight, chunks_in_flight_by_stage, microbatches_in_flight
from megatron_lynx.cost.layer import kept_bytes, layers_bytes
from megatron_lynx.cost.parameters import fp8_copies_bytes, gradient_bytes, optimizer_bytes, parameter_bytes, stage_parameters
from megatron_lynx.cost.stage import of_every_stage
from megatron_lynx.profiler.expert_tensors import routed_rows
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.profiler.tensors import embedding_bytes, head_bytes, logits_bytes

REST_BYTES = {"cuda": 1_200_000_000, "cpu": 0}
"""What Yuan et al. measured on a GPU beside everything else (about 1.2e9). On the CPU testbed it is unknown and not counted."""

CHUNKS_NOT_OFFLOADED = 4
"""One chunk is run, one is copied out, and two come back: with no more than these, nothing is offloaded."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one device of one stage."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    staging: int
    embedding: int
    head: int
    logits: int
    recomputed: int
    rest: int
    fp8_weights: int = 0
    second_weights: int = 0
    second_gradients: int = 0

    @property
    def always(self) -> int:
        """What is held before there is any activation."""
        states = self.parameters + self.gradients + self.optimizer
        return states + self.fp8_weights + self.second_weights + self.second_gradients + self.rest

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    @property
    def named(self) -> dict[str, int]:
        """The total, then every part."""
        return {"total": self.total, **asdict(self)}


def stage_memory(job: Job, stage: int, offload_ratio: float = 0.0) -> StageMemory:
    """A stage under `job.policy` (not `planned`, of which only a plan knows), offloading this share of each chunk's bytes."""
    return _stage(job, stage, LayerShape.of(job), _states(job, stage), chunks_in_flight(job, stage), offload_ratio)


def memory_of_stages(job: Job, offload_ratio: float = 0.0) -> tuple[StageMemory, ...]:
    """The memory of every stage, as `stage_memory` has it, in less time."""
    shape, states = LayerShape.of(job), of_every_stage(job, lambda stage: _states(job, stage))
    in_flight = chunks_in_flight_by_stage(job)
    return tuple(
        _stage(job, stage, shape, states[stage], in_flight[stage], offload_ratio) for stage in range(job.parallel.pipeline)
    )


def _stage(job: Job, stage: int, shape: LayerShape, states: tuple[int, int, int], in_flight: int, ratio: float) -> StageMemory:
    """The memory of one stage. `states`: its parameters, gradients and optimizer state; `in_flight`: chunks."""
    last, size = stage == job.parallel.pipeline - 1, _largest_chunk(job, stage, shape)
    parameters, gradients, _ = states
    without_flushes = job.schedule == "double_buffered"
    return StageMemory(
        *states,
        *_layers(size, in_flight, ratio, last),
        embedding=microbatches_in_flight(job, stage) * embedding_bytes(shape) if stage == 0 else 0,
        head=head_bytes(shape) if last else 0,
        logits=logits_bytes(shape) if last else 0,
        recomputed=_recomputed(shape, job.policy, job.experts_on(stage) > 0),
        rest=REST_BYTES[job.cluster.device] + (_dispatched(shape) if job.experts_on(stage) else 0),
        fp8_weights=fp8_copies_bytes(job, stage),
        second_weights=parameters if without_flushes else 0,
        second_gradients=gradients if without_flushes and job.defer_updates and stage > 0 else 0,
    )


def _states(job: Job, stage: int) -> tuple[int, int, int]:
    """Bytes of a stage's parameters, gradients and optimizer state."""
    parameters = stage_parameters(job, stage)
    count = parameters.total
    return parameter_bytes(job, count), gradient_bytes(job, count), optimizer_bytes(job, count, parameters.experts)


def chunk_bytes(job: Job, stage: int) -> int:
    """What the layers of one chunk keep of one micro-batch (C); of the largest chunk, where a stage's differ."""
    return _largest_chunk(job, stage, LayerShape.of(job))


def _largest_chunk(job: Job, stage: int, shape: LayerShape) -> int:
    if job.model.experts is None:
        return max(job.chunk_layers(stage)) * kept_bytes(shape, job.policy)
    chunks = enumerate(job.chunk_layers(stage))
    return max(layers_bytes(shape, job.policy, layers, job.experts_of(stage, chunk)) for chunk, layers in chunks)


def offloads(job: Job, stage: int) -> bool:
    """Whether a stage has so many chunks in flight that offloading can gain anything."""
    return chunks_in_flight(job, stage) > CHUNKS_NOT_OFFLOADED


def host_bytes(job: Job, stage: int, offload_ratio: float) -> int:
    """Pinned host memory of one rank: of every chunk in flight but the two that are whole."""
    return round(offload_ratio * (chunks_in_flight(job, stage) - 2) * chunk_bytes(job, stage)) if offloads(job, stage) else 0


def _layers(size: int, count: int, ratio: float, last: bool) -> tuple[int, int]:
    """Bytes of activations that layers keep, and of staging buffers, with so many chunks of this size in flight."""
    if ratio == 0 or count <= CHUNKS_NOT_OFFLOADED:
        return count * size, 0
    whole = 1 if last else 2
    return round((count - whole) * (1 - ratio) * size) + whole * size, round(2 * ratio * size)


def _recomputed(shape: LayerShape, policy: Policy, experts: bool) -> int:
    """What the layer that makes most again holds meanwhile; a stage with experts may have none without, whose layers keep less
    as a rule."""
    if policy not in ("full", "selective"):
        return 0
    return kept_bytes(shape, "none", experts) - kept_bytes(shape, policy, experts)


def _dispatched(shape: LayerShape) -> int:
    """Rows on their way to experts and back: what is sent and what arrives, while a half of experts runs."""
    return 2 * routed_rows(shape) * shape.model.hidden * shape.model.element_bytes
