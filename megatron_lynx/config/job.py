"""A job: model, cluster, layout and memory budget. Keys of quantities end in their unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Annotated, Literal

from pydantic import Field

from megatron_lynx.anatomy import LayerKind, Section
from megatron_lynx.config import fit
from megatron_lynx.config.cluster import Cluster
from megatron_lynx.config.device_reserve import Communicator, DeviceReserve, FusedDispatch, communicators, device_reserve
from megatron_lynx.config.model import Model
from megatron_lynx.config.parallel import Optimizer, Overlap, Parallel
from megatron_lynx.figures import Learned
from megatron_lynx.fp8_recipes import gathers_once
from megatron_lynx.kinds.captured import CapturedModule
from megatron_lynx.schedule.flushes import groups_needed
from megatron_lynx.units import GIB
from megatron_lynx.validation import Part, digest_of

Policy = Literal["none", "selective", "balanced", "full", "planned"]
"""Recomputation: none; stock's core attention; norms and activation (Yuan et al.); whole layers; by a plan."""

MOST_MICROBATCHES = 20_000
Schedule = Literal["flush", "double_buffered"]
"""Pipeline schedule. flush: drained before each update (1F1B, interleaved with several chunks per stage). double_buffered: never
drained, with gradients one update old (PipeDream-2BW)."""


class Lengths(Part):
    """Lengths of packed sequences in tokens. Queries attend only to keys of their own sequence.

    In a job file, `lengths` may also name a file of lengths, separated by blanks or lines (`config.loader`).
    """

    mean: float = Field(ge=1, le=1e9)
    mean_square: float | None = Field(default=None, ge=1, le=1e18)
    """Mean of the squares; None: all sequences have the mean length, the cheapest case for attention."""

    def _problems(self) -> Iterator[str]:
        if self.mean_square is not None and self.mean_square < self.mean**2 * (1 - 1e-9):
            yield f"mean_square ({self.mean_square:g}) must be at least the square of mean ({self.mean**2:g})"

    def seen(self, seq: int) -> float:
        """Return the query-key pairs in a pack of `seq` tokens, relative to one causal sequence: l tokens have l (l + 1) / 2."""
        return min(1.0, (self.squares_per_token + 1) / (seq + 1))

    @property
    def squares_per_token(self) -> float:
        """Sum of squared lengths over sum of lengths: the mean sequence length over tokens."""
        return self.mean if self.mean_square is None else self.mean_square / self.mean


class Batch(Part):
    micro: int = Field(ge=1)
    """Sequences of one micro-batch (b)."""
    global_: int = Field(ge=1, le=100_000_000, alias="global")
    """Sequences of one optimizer step over all replicas (B)."""
    lengths: Lengths | None = None
    """Lengths of the sequences packed into `model.seq` tokens; None: one sequence."""
    packed: bool | None = None
    """Whether sequences are packed; None: if `lengths` is given."""

    @property
    def is_packed(self) -> bool:
        return self.lengths is not None if self.packed is None else self.packed


Leaving = Literal["parameters", "gradients", "optimizer"]


class Beside(Part):
    """Memory that another component uses on each device during training, such as a reference model or an inference engine."""

    what: str = Field(min_length=1)
    gib: float = Field(gt=0, le=1e9)


class Budget(Part):
    """Memory that a plan may use. By default, on GPUs: the device's memory without its cluster's reserve and other processes; on
    the testbed the planner minimizes memory."""

    activation_mib: float | None = Field(default=None, gt=0, le=1e12)
    """Activations of one stage's layers, all micro-batches in flight, per rank."""
    memory_gib: float | None = Field(default=None, gt=0, le=1e9)
    """PyTorch's allocations on one device; None: the cluster's memory without its reserve."""
    expandable_segments: bool = True
    """Whether the run sets PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, which lowers the allocator's slack."""
    share: float | None = Field(default=None, gt=0, le=1)
    """Share of the device memory that PyTorch reports for the training process, including context, libraries, NCCL's buffers and
    allocator slack. The rest belongs to other processes: an inference engine configured with 0.45 leaves 0.55."""
    beside: tuple[Beside, ...] = ()
    leaves: tuple[Leaving, ...] = ()
    """State that moves to host memory between phases of training. Plans ignore it; `estimate` shows both phases."""

    def _problems(self) -> Iterator[str]:
        if self.memory_gib is not None and (self.share is not None or self.beside):
            yield "budget.memory_gib is all that may be used: leave it out, or budget.share and budget.beside"

    @property
    def of_device(self) -> bool:
        return self.memory_gib is not None or self.share is not None or bool(self.beside)


class Head(Part):
    """An output layer computed in pieces. Its bits differ from stock's: the weight's gradient is summed in another order."""

    pieces: Literal["auto"] | Annotated[int, Field(ge=2, le=1_000_000)]
    """Pieces of a sequence, whose logits are computed one after the other; auto: the planner decides."""


class Job(Part):
    """A whole job, immutable once loaded. Digest and derived numbers are properties."""

    model: Model
    cluster: Cluster
    gpus: int = Field(ge=1)
    """Ranks of the job (processes, on the CPU testbed)."""
    parallel: Parallel = Parallel()
    optimizer: Optimizer = Optimizer()
    overlap: Overlap = Overlap()
    batch: Batch
    policy: Policy = "planned"
    offload_ratio: Literal["auto"] | Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of a chunk's saved bytes that is offloaded to host memory; auto: the fastest share for plans, the smallest that fits
    for other policies."""
    whole_microbatches: Literal["auto"] | Annotated[int, Field(ge=0)] = 0
    """Micro-batches in flight on each stage that keep everything (Korthikanti et al., appendix C); auto: as many as fit."""
    budget: Budget = Budget()
    schedule: Schedule = "flush"
    defer_updates: bool = True
    """double_buffered only: whether stages continue with the next batch, into a second gradient buffer, until all can update
    together."""
    head: Head | None = None
    unavailable: tuple[Literal["head", "offload", "overlap", "userbuffers"], ...] = ()
    """Stock's settings that the launch's training loop has no code for, or refuses; they are not recommended."""
    learned: Learned = Learned()
    """Corrections learned from a run (`from_run`). They are in neither job files nor the digest: the job is the same."""

    def _problems(self) -> list[str]:
        model, parallel = self.model, self.parallel
        problems = [*fit.size_problems(model, parallel), *fit.layer_problems(model.layers, parallel)]
        if self.gpus % parallel.ranks:
            sizes = "parallel.tensor x parallel.context x parallel.pipeline"
            problems.append(
                f"gpus ({self.gpus}) must be a multiple of {sizes} ({parallel.ranks}), {_nearest(self.gpus, parallel.ranks)}"
            )
        elif self.batch.global_ % (share := self.batch.micro * self.replicas):
            needed = f"batch.micro x replicas ({share}), {_nearest(self.batch.global_, share)}"
            problems.append(f"batch.global ({self.batch.global_}) must be a multiple of {needed}")
        elif self.microbatches > MOST_MICROBATCHES:
            todo = "enlarge batch.micro, or use more gpus"
            problems.append(f"micro-batches of a pipeline ({self.microbatches}) must be no more than {MOST_MICROBATCHES}: {todo}")
        elif self.chunks > 1:
            needed_groups = groups_needed(self.microbatches, self.microbatch_group, parallel.pipeline, "parallel.")
            if needed_groups is not None:
                subject = f"micro-batches of a pipeline ({self.microbatches})"
                problems.append(f"{subject} must be {needed_groups} with several chunks on each stage")
        problems += fit.expert_problems(model, parallel, self.gpus)
        if not problems:
            problems += fit.instance_problems(parallel, self.gpus)
        optimizer, sharded = self.optimizer, "needs parallel.distributed_optimizer: true, found false"
        if optimizer.gradients == "bf16" and model.dtype == "fp32":
            problems.append("optimizer.gradients bf16 needs weights in 16 bits, found model.dtype fp32")
        if optimizer.offload != 0 and self.cluster.device == "cpu":
            problems.append(f"optimizer.offload {optimizer.offload} needs cluster.device cuda, found cpu")
        if not parallel.distributed_optimizer:
            asked = [name for name in ("precision_aware", "states_on_host") if getattr(optimizer, name)]
            problems += [f"optimizer.{name} {sharded}" for name in asked]
            problems += [f"overlap.parameters {sharded}: else none are gathered"] if self.overlap.parameters else []
        if self.overlap.userbuffers and parallel.tensor > 1 and not parallel.sequence_parallel:
            problems.append("overlap.userbuffers needs parallel.sequence_parallel: true, found false, as Megatron refuses it")
        problems += self._head_problems()
        problems += self._whole_problems()
        problems += fit.fp8_problems(model, parallel, self.batch.micro, self.cluster)
        problems += fit.fp8_parameter_problems(model, parallel, self.optimizer)
        if model.fp8_recipe == "nvfp4" and self.userbuffers:
            problems.append("overlap.userbuffers is true, needed false with model.fp8.recipe nvfp4: such linears have none")
        if not problems:
            if self.schedule == "double_buffered":
                return list(self._flushless_problems())
            if not self.defer_updates:
                return ["defer_updates is false, but schedule flush has nothing to defer: leave it out"]
        return problems

    def _head_problems(self) -> Iterator[str]:
        if self.head is None:
            return
        rows, pieces = self.model.seq // self.parallel.context, self.head_pieces
        if rows % pieces:
            yield f"head.pieces ({pieces}) must divide the tokens of a sequence on one rank ({rows})"
        if self.model.adapters is not None:
            yield "head.pieces needs no model.adapters: the output layer's weight is frozen"
        if "head" in self.unavailable:
            yield "head.pieces is set, and unavailable has head: the trainer computes its loss from logits by itself"
        if self.model.mtp:
            yield f"head.pieces needs model.mtp 0, found {self.model.mtp}: other losses read the same rows"
        if self.schedule == "double_buffered":
            yield "head.pieces needs schedule flush, found double_buffered: logits are computed again in backward"

    def _whole_problems(self) -> Iterator[str]:
        if self.whole_microbatches == 0:
            return
        if self.policy != "planned":
            yield f"whole_microbatches needs policy planned, found {self.policy}"
        if self.offload_ratio != 0:
            yield f"whole_microbatches needs offload_ratio 0, found {self.offload_ratio}: one of the two saves the memory"
        if self.chunks > 1 or self.schedule != "flush":
            yield f"whole_microbatches needs one chunk on each stage and schedule flush, found {self.chunks} and {self.schedule}"
        if self.model.moe_overlapped:
            yield "whole_microbatches needs model.experts.overlapped: false, found true: nodes of two micro-batches alternate"

    def _flushless_problems(self) -> Iterator[str]:
        pipeline, microbatches, todo = self.parallel.pipeline, self.microbatches, "or train with schedule flush"
        if pipeline == 1:
            yield f"parallel.pipeline (1) has no flush to leave out, schedule double_buffered needs at least 2, {todo}"
            return
        yield from (f"{why}, {todo}" for why in fit.needs_flushes(self.model))
        if self.model.adapters is not None:
            yield f"model.adapters need schedule flush: frozen weights have one version, {todo}"
        if (instances := self.parallel.optimizer_instances) > 1:
            yield f"parallel.optimizer_instances ({instances}) must be 1 without flushes, {todo}"
        for name in ("offload", "states_on_host"):
            if (share := getattr(self.optimizer, name)) != 0:
                yield f"optimizer.{name} {share} needs all of it on the device: 0, {todo}"
        if self.chunks > 1:
            needed = "chunk of each stage: it cannot be interleaved"
            yield f"parallel makes {self.chunks} chunks of each stage, schedule double_buffered needs 1 {needed}, {todo}"
        if microbatches < pipeline:
            needed = f"at least parallel.pipeline ({pipeline}) with schedule double_buffered, or two versions would not do"
            yield f"micro-batches of a pipeline ({microbatches}) must be {needed}: enlarge batch.global, {todo}"

    @property
    def replicas(self) -> int:
        return self.gpus // self.parallel.ranks

    @property
    def optimizer_sharers(self) -> int:
        """Ranks that share the distributed optimizer's state of non-expert parameters."""
        return self.parallel.context * self.replicas // self.parallel.optimizer_instances

    @property
    def microbatches(self) -> int:
        return self.batch.global_ // (self.batch.micro * self.replicas)

    @property
    def microbatch_group(self) -> int:
        return self.parallel.microbatch_group or self.parallel.pipeline

    @property
    def keeps_gathered(self) -> bool:
        """Whether linears with an input gathered by sequence parallelism are never recomputed."""
        if self.userbuffers or (self.model.adapted and self.parallel.tensor > 1):
            return True
        return self.parallel.sequence_parallel and not gathers_once(self.model.fp8_recipe)

    @property
    def userbuffers(self) -> bool:
        """Whether linears exchange inside their GEMMs with userbuffers; such exchanges are no windows."""
        return self.overlap.userbuffers and self.parallel.tensor > 1

    @property
    def no_windows(self) -> bool:
        """Whether no tensor-parallel collective is a window: adapters issue collectives between those of the layer."""
        return self.userbuffers or bool(self.model.adapted)

    def with_captured(self, modules: tuple[CapturedModule, ...]) -> Job:
        if self.model.captured == modules:
            return self
        return self.model_copy(update={"model": self.model.model_copy(update={"captured": modules})})

    def with_userbuffers(self, on: bool) -> Job:
        return self.model_copy(update={"overlap": self.overlap.model_copy(update={"userbuffers": on})})

    @property
    def rotary_asks_host(self) -> bool:
        """Whether unfused RoPE synchronizes the host with the device to read the lengths of packed sequences."""
        latent = self.model.latent
        fused = self.model.fuses("rope") if latent is None else latent.fused_rotary
        return self.batch.is_packed and self.model.position == "rope" and not fused

    @property
    def head_pieces(self) -> int:
        return 1 if self.head is None or self.head.pieces == "auto" else self.head.pieces

    @property
    def chunks(self) -> int:
        return len(self.partition) // self.parallel.pipeline

    @property
    def partition(self) -> tuple[int, ...]:
        """Layers of every virtual stage, in layer order: virtual stage k is chunk k // p of stage k % p."""
        if isinstance(self.parallel.partition, tuple):
            return self.parallel.partition
        if self.parallel.layers_per_chunk is None:
            layers, more = divmod(self.model.layers, self.parallel.pipeline)
            return (layers,) * (self.parallel.pipeline - more) + (layers + 1,) * more
        layers = self.parallel.layers_per_chunk
        return (layers,) * (self.model.layers // layers)

    @property
    def memory_budget_bytes(self) -> int:
        """Device memory for PyTorch's allocations; negative if the reserve exceeds the device."""
        stated, device_bytes = self.budget.memory_gib, self.learned.device_bytes
        budget_bytes = self.device_reserve.left_bytes if stated is None else int(GIB * stated)
        return budget_bytes if device_bytes is None else min(budget_bytes, device_bytes)

    @property
    def communicators(self) -> tuple[Communicator, ...]:
        node_gpus = self.gpus if self.cluster.node is None else self.cluster.node.gpus
        tied, experts = self.model.tied_embeddings or self.model.mtp > 0, self.model.experts
        dispatcher = None if experts is None else experts.dispatcher
        return communicators(self.parallel, self.gpus, node_gpus, tied=tied, dispatcher=dispatcher)

    @property
    def fused_dispatch(self) -> FusedDispatch:
        return FusedDispatch(self.model, self.parallel, self.batch.micro, self.cluster)

    @property
    def device_reserve(self) -> DeviceReserve:
        segments = self.budget.expandable_segments
        buffers = self.fused_dispatch.buffers_bytes
        reserve = device_reserve(self.cluster, self.communicators, expandable_segments=segments, dispatch_bytes=buffers)
        return reserve.beside(self.budget.share, {component.what: component.gib for component in self.budget.beside})

    @property
    def host_sharers(self) -> int:
        node = self.cluster.node
        return self.gpus if node is None else min(node.gpus, self.gpus)

    def layers_of(self, stage: int, chunk: int = 0) -> range:
        partition, virtual_stage = self.partition, chunk * self.parallel.pipeline + stage
        first = sum(partition[:virtual_stage]) + 1
        return range(first, first + partition[virtual_stage])

    def chunk_layers(self, stage: int) -> tuple[int, ...]:
        return self.partition[stage :: self.parallel.pipeline]

    def layers_on(self, stage: int) -> int:
        return sum(self.chunk_layers(stage))

    def experts_on(self, stage: int) -> int:
        return sum(layers for (_, second), layers in self.kinds_on(stage).items() if second.exchanges)

    def kinds_of(self, stage: int, chunk: int = 0) -> Counter[LayerKind]:
        return self.model.kinds_of(self.layers_of(stage, chunk))

    def kinds_on(self, stage: int) -> Counter[LayerKind]:
        return self.model.kinds_of([*chain.from_iterable(self.layers_of(stage, chunk) for chunk in range(self.chunks))])

    def halves_on(self, stage: int) -> Counter[Section]:
        counts = Counter[Section]()
        for kind, layers in self.kinds_on(stage).items():
            counts.update(dict.fromkeys(kind, layers))
        return counts

    @property
    def digest(self) -> str:
        """Without host time and CPUs, which every release measures again, and fusions, which a measured profile includes."""
        cluster = {"host_time": True, "node": {"cores", "memory_gb_per_s"}}
        return digest_of(self, {"learned": True, "cluster": cluster, "model": {"fusions"}})


def _nearest(number: int, step: int) -> str:
    below = number // step * step
    return f"such as {below} or {below + step}" if below else f"such as {step}"
