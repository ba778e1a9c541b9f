"""A job: what is to be trained, where, and under which memory budget. Every quantity has its unit in its key."""

from __future__ import annotations

import hashlib
from collections import Counter
from itertools import chain
from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatron_lynx.anatomy import LayerKind, Section
from megatron_lynx.config.cluster import Cluster
from megatron_lynx.config.communicators import Communicator, communicators
from megatron_lynx.config.device_reserve import DeviceReserve, device_reserve
from megatron_lynx.config.fit import (
    expert_problems,
    fp8_parameter_problems,
    fp8_problems,
    instance_problems,
    layer_problems,
    needs_flushes,
    size_problems,
)
from megatron_lynx.config.fused_dispatch import FusedDispatch
from megatron_lynx.config.later import left_out
from megatron_lynx.config.model import Model
from megatron_lynx.config.optimizer import Optimizer
from megatron_lynx.config.overlap import Overlap
from megatron_lynx.config.parallel import Parallel
from megatron_lynx.fp8_recipes import gathers_once
from megatron_lynx.learned import Learned
from megatron_lynx.schedule.interleaved import groups_needed
from megatron_lynx.units import GIB
from megatron_lynx.validation import Part

Policy = Literal["none", "selective", "balanced", "full", "planned"]
"""What is recomputed: nothing; stock's core attention; norms and activation (Yuan et al.); whole layers; as planned."""


MOST_MICROBATCHES = 20_000
"""The most that a pipeline may have in one step. Each is simulated by itself, and a mistyped number must be answered at once."""


Schedule = Literal["flush", "double_buffered"]
"""How a pipeline goes from batch to batch: it is emptied before each update (1F1B; interleaved, where stages have several
chunks), or never, at the price of gradients that are one update old (PipeDream-2BW)."""


class Lengths(Part):
    """Lengths of packed sequences in tokens. Queries see keys of their own sequence alone.

    In a job file also the name of a file of lengths, separated by blanks or lines (`config.loader`).
    """

    mean: float = Field(ge=1, le=1e9)
    """Of all sequences."""
    mean_square: float | None = Field(default=None, ge=1, le=1e18)
    """The mean of their squares. None: all are as long as the mean, so that attention takes the least time that it can."""

    @model_validator(mode="after")
    def _spread(self) -> Lengths:
        if self.mean_square is not None and self.mean_square < self.mean**2 * (1 - 1e-9):
            raise ValueError(f"mean_square ({self.mean_square:g}) must be at least the square of mean ({self.mean**2:g})")
        return self

    def seen(self, seq: int) -> float:
        """Pairs of queries and keys in a pack of `seq` tokens, over those that a causal mask leaves of one sequence of as many.

        l tokens have l (l + 1) / 2 pairs, and there are seq / mean sequences in a pack.
        """
        return min(1.0, (self.squares_per_token + 1) / (seq + 1))

    @property
    def squares_per_token(self) -> float:
        """The sum of the squares over the sum: how long a sequence is in which a token finds itself."""
        return self.mean if self.mean_square is None else self.mean_square / self.mean


class Batch(Part):
    """Sizes in sequences."""

    micro: int = Field(ge=1)
    """Sequences of one micro-batch (b)."""
    global_: int = Field(ge=1, le=100_000_000, alias="global")
    """Sequences of one optimizer step over all replicas (B)."""
    lengths: Lengths | None = None
    """Of the sequences that are packed into one of `model.seq` tokens. None: it is a single one."""
    packed: bool | None = None
    """Whether sequences are packed. None: where their lengths are stated."""

    @property
    def is_packed(self) -> bool:
        return self.lengths is not None if self.packed is None else self.packed


Leaving = Literal["parameters", "gradients", "optimizer"]
"""What of training may go to host memory while others have the device."""


class Beside(Part):
    """Something that stays on each device while training runs: a reference model, what an inference engine does not give back."""

    what: str = Field(min_length=1)
    gib: float = Field(gt=0, le=1e9)


class Budget(Part):
    """What a plan may use. Without a figure: on GPUs what the device reports, less its cluster's reserve and what others have; on
    the testbed the planner aims at the least memory."""

    activation_mib: float | None = Field(default=None, gt=0, le=1e12)
    """Resident activations of one stage's layers, all micro-batches in flight, per rank."""
    memory_gib: float | None = Field(default=None, gt=0, le=1e9)
    """Everything on one device that PyTorch allocates. None: the cluster's memory, less its reserve."""
    expandable_segments: bool = True
    """Whether the run has PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, which leaves less unused. It decides how much is
    reserved for that."""
    share: float | None = Field(default=None, gt=0, le=1)
    """Of the device's memory, as PyTorch reports it: what the training process may take, its context, libraries, NCCL's buffers
    and the allocator's slack included. The rest belongs to others: an inference engine that is told 0.45 leaves 0.55."""
    beside: tuple[Beside, ...] = ()
    """What else stays on each device while training runs."""
    leaves: tuple[Leaving, ...] = ()
    """What goes to host memory between phases of training. Nothing that a plan has to fit in: `estimate` shows both phases."""

    @model_validator(mode="after")
    def _said_once(self) -> Budget:
        if self.memory_gib is not None and (self.share is not None or self.beside):
            raise ValueError("budget.memory_gib is all that may be used: leave it out, or budget.share and budget.beside")
        return self

    @property
    def of_device(self) -> bool:
        """Whether it says what may be used of a device."""
        return self.memory_gib is not None or self.share is not None or bool(self.beside)


class Head(Part):
    """A head in pieces, which does not equal stock's in every bit: the gradient of its weight is another sum."""

    pieces: Literal["auto"] | Annotated[int, Field(ge=2, le=1_000_000)]
    """Parts of a sequence, whose logits are there one after the other; auto: the planner decides whether, and how many."""


class Job(Part):
    """The whole job. Digest and derived numbers are properties; nothing is changed after loading."""

    model: Model
    cluster: Cluster
    gpus: int = Field(ge=1)
    """Ranks in the job (processes, on the CPU testbed)."""
    parallel: Parallel = Parallel()
    optimizer: Optimizer = Optimizer()
    overlap: Overlap = Overlap()
    batch: Batch
    policy: Policy = "planned"
    offload_ratio: Literal["auto"] | Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the bytes that a chunk saves for backward which goes to host memory; auto: what makes a plan fastest, or for other
    policies the smallest that fits."""
    budget: Budget = Budget()
    schedule: Schedule = "flush"
    defer_updates: bool = True
    """Without flushes: whether stages go on with the next batch until all can update together, into a second gradient buffer."""
    head: Head | None = None
    """None: the head is whole, as stock has it."""
    learned: Learned = Learned()
    """What a run has taught (`from_run`). Nobody writes it into a file, and no digest has it: it is the same job."""

    @model_validator(mode="after")
    def _divisible(self) -> Job:
        model, parallel = self.model, self.parallel
        problems = [*size_problems(model, parallel), *layer_problems(model.layers, parallel)]
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
            problems += self._interleaving_problems()
        problems += expert_problems(model, parallel, self.gpus)
        if not problems:
            problems += instance_problems(parallel, self.gpus)
        if self.optimizer.gradients == "bf16" and model.dtype == "fp32":
            problems.append("optimizer.gradients bf16 needs weights in 16 bits, found model.dtype fp32")
        if self.optimizer.precision_aware and not parallel.distributed_optimizer:
            problems.append("optimizer.precision_aware needs parallel.distributed_optimizer: true, found false")
        if self.optimizer.offload != 0 and self.cluster.device == "cpu":
            problems.append(f"optimizer.offload {self.optimizer.offload} needs cluster.device cuda, found cpu")
        if self.optimizer.states_on_host and not parallel.distributed_optimizer:
            problems.append("optimizer.states_on_host needs parallel.distributed_optimizer: true, found false")
        if self.overlap.parameters and not parallel.distributed_optimizer:
            problems.append("overlap.parameters needs parallel.distributed_optimizer: true, found false: else none are gathered")
        if self.overlap.userbuffers and parallel.tensor > 1 and not parallel.sequence_parallel:
            problems.append("overlap.userbuffers needs parallel.sequence_parallel: true, found false, as Megatron refuses it")
        problems += self._head_problems()
        problems += fp8_problems(model, parallel, self.batch.micro, self.cluster)
        problems += fp8_parameter_problems(model, parallel, self.optimizer)
        if model.fp8_recipe == "nvfp4" and self.userbuffers:
            problems.append("overlap.userbuffers is true, needed false with model.fp8.recipe nvfp4: such linears have none")
        if not problems:
            problems = self._flushless_problems() if self.schedule == "double_buffered" else self._flushing_problems()
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _head_problems(self) -> list[str]:
        """Pieces of a head that cannot be."""
        if self.head is None:
            return []
        rows, pieces, problems = self.model.seq // self.parallel.context, self.head_pieces, []
        if rows % pieces:
            problems.append(f"head.pieces ({pieces}) must divide the tokens of a sequence on one rank ({rows})")
        if self.model.mtp:
            problems.append(f"head.pieces needs model.mtp 0, found {self.model.mtp}: other losses read the same rows")
        if self.schedule == "double_buffered":
            problems.append("head.pieces needs schedule flush, found double_buffered: logits are computed again in backward")
        return problems

    def _interleaving_problems(self) -> list[str]:
        needed = groups_needed(self.microbatches, self.microbatch_group, self.parallel.pipeline, "parallel.")
        found = f"micro-batches of a pipeline ({self.microbatches})"
        return [] if needed is None else [f"{found} must be {needed} with several chunks on each stage"]

    def _flushless_problems(self) -> list[str]:
        """Two versions of the weights are enough where a batch has a micro-batch for every stage, and stages have one chunk."""
        pipeline, found, todo = self.parallel.pipeline, self.microbatches, "or train with schedule flush"
        if pipeline == 1:
            return [f"parallel.pipeline (1) has no flush to leave out, schedule double_buffered needs at least 2, {todo}"]
        problems = [f"{why}, {todo}" for why in needs_flushes(self.model)]
        if self.parallel.optimizer_instances > 1:
            instances = self.parallel.optimizer_instances
            problems.append(f"parallel.optimizer_instances ({instances}) must be 1 without flushes, {todo}")
        for name in ("offload", "states_on_host"):
            if (share := getattr(self.optimizer, name)) != 0:
                problems.append(f"optimizer.{name} {share} needs all of it on the device: 0, {todo}")
        if self.chunks > 1:
            needed = "chunk of each stage: it cannot be interleaved"
            problems.append(
                f"parallel makes {self.chunks} chunks of each stage, schedule double_buffered needs 1 {needed}, {todo}"
            )
        if found < pipeline:
            needed = f"at least parallel.pipeline ({pipeline}) with schedule double_buffered, or two versions would not do"
            problems.append(f"micro-batches of a pipeline ({found}) must be {needed}: enlarge batch.global, {todo}")
        return problems

    def _flushing_problems(self) -> list[str]:
        return [] if self.defer_updates else ["defer_updates is false, but schedule flush has nothing to defer: leave it out"]

    @property
    def replicas(self) -> int:
        """Data-parallel size."""
        return self.gpus // self.parallel.ranks

    @property
    def optimizer_sharers(self) -> int:
        """Ranks among which the optimizer's state of what they all hold is shared out, if it is: experts apart."""
        return self.parallel.context * self.replicas // self.parallel.optimizer_instances

    @property
    def microbatches(self) -> int:
        """Micro-batches of one pipeline in one step (m)."""
        return self.batch.global_ // (self.batch.micro * self.replicas)

    @property
    def microbatch_group(self) -> int:
        """Micro-batches that pass one chunk before the next one has its turn (g)."""
        return self.parallel.microbatch_group or self.parallel.pipeline

    @property
    def keeps_gathered(self) -> bool:
        """Whether no linear runs again whose input sequence parallelism gathers: it owns a userbuffer, or one gather does not
        serve its weight gradient as well."""
        return self.userbuffers or (self.parallel.sequence_parallel and not gathers_once(self.model.fp8_recipe))

    @property
    def userbuffers(self) -> bool:
        """Whether linears exchange with other tensor-parallel ranks inside their GEMMs: such an exchange is no window."""
        return self.overlap.userbuffers and self.parallel.tensor > 1

    def with_userbuffers(self, on: bool) -> Job:
        return self.model_copy(update={"overlap": self.overlap.model_copy(update={"userbuffers": on})})

    @property
    def rotary_asks_host(self) -> bool:
        """Whether turning queries and keys makes the host wait for the device, to ask how long packed sequences are, each time it
        runs. The fused kernel need not ask."""
        return self.batch.is_packed and self.model.position == "rope" and not self.model.fuses_rotary

    @property
    def head_pieces(self) -> int:
        """Pieces of the head; 1 where it is whole, or the planner has not decided yet."""
        return 1 if self.head is None or self.head.pieces == "auto" else self.head.pieces

    @property
    def chunks(self) -> int:
        """Chunks of one stage (v); 1 in plain 1F1B."""
        return len(self.partition) // self.parallel.pipeline

    @property
    def partition(self) -> tuple[int, ...]:
        """Layers of every virtual stage, in layer order: virtual stage k is chunk k // p of stage k % p."""
        if isinstance(self.parallel.partition, tuple):
            return self.parallel.partition
        if self.parallel.layers_per_chunk is None:
            each, more = divmod(self.model.layers, self.parallel.pipeline)
            return (each,) * (self.parallel.pipeline - more) + (each + 1,) * more
        each = self.parallel.layers_per_chunk
        return (each,) * (self.model.layers // each)

    @property
    def memory_budget_bytes(self) -> int:
        """What may be used of one device, by what PyTorch allocates; below 0 where nothing is left beside the reserve.
        Never more than a run has shown to be there."""
        stated, found = self.budget.memory_gib, self.learned.device_bytes
        own = self.device_reserve.left_bytes if stated is None else int(GIB * stated)
        return own if found is None else min(own, found)

    @property
    def communicators(self) -> tuple[Communicator, ...]:
        """What NCCL connects of this layout."""
        node_gpus = self.gpus if self.cluster.node is None else self.cluster.node.gpus
        tied, experts = self.model.tied_embeddings or self.model.mtp > 0, self.model.experts
        dispatcher = None if experts is None else experts.dispatcher
        return communicators(self.parallel, self.gpus, node_gpus, tied=tied, dispatcher=dispatcher)

    @property
    def fused_dispatch(self) -> FusedDispatch:
        """What brings tokens to experts with kernels of its own, if any does."""
        return FusedDispatch(self.model, self.parallel, self.batch.micro, self.cluster)

    @property
    def device_reserve(self) -> DeviceReserve:
        """What is left alone on one device, by part; counted, whether a budget is stated or not."""
        segments = self.budget.expandable_segments
        buffers = self.fused_dispatch.buffers_bytes
        reserve = device_reserve(self.cluster, self.communicators, expandable_segments=segments, dispatch_bytes=buffers)
        return reserve.beside(self.budget.share, {each.what: each.gib for each in self.budget.beside})

    @property
    def host_sharers(self) -> int:
        """The job's devices in one node, which share its host memory; all of them where no node is described."""
        node = self.cluster.node
        return self.gpus if node is None else min(node.gpus, self.gpus)

    def layers_of(self, stage: int, chunk: int = 0) -> range:
        """Megatron's layer numbers (from 1) of one chunk of a stage."""
        partition, virtual_stage = self.partition, chunk * self.parallel.pipeline + stage
        first = sum(partition[:virtual_stage]) + 1
        return range(first, first + partition[virtual_stage])

    def chunk_layers(self, stage: int) -> tuple[int, ...]:
        """How many layers each chunk of a stage has."""
        return self.partition[stage :: self.parallel.pipeline]

    def layers_on(self, stage: int) -> int:
        """How many layers a stage has, in all its chunks."""
        return sum(self.chunk_layers(stage))

    def experts_of(self, stage: int, chunk: int = 0) -> int:
        """How many layers of one chunk of a stage have experts."""
        layers = self.model.expert_layers
        return sum(layer in layers for layer in self.layers_of(stage, chunk)) if layers else 0

    def experts_on(self, stage: int) -> int:
        """How many layers of a stage have experts, in all its chunks."""
        return sum(self.experts_of(stage, chunk) for chunk in range(self.chunks)) if self.model.experts is not None else 0

    def kinds_of(self, stage: int, chunk: int = 0) -> Counter[LayerKind]:
        """How many layers of each kind one chunk of a stage has."""
        return self.model.kinds_of(self.layers_of(stage, chunk))

    def kinds_on(self, stage: int) -> Counter[LayerKind]:
        """The same of all its chunks."""
        return self.model.kinds_of(chain.from_iterable(self.layers_of(stage, chunk) for chunk in range(self.chunks)))

    def halves_on(self, stage: int) -> Counter[Section]:
        """What fills the halves of a stage's layers, and how many times."""
        counts = Counter[Section]()
        for kind, layers in self.kinds_on(stage).items():
            counts.update(dict.fromkeys(kind, layers))
        return counts

    @property
    def digest(self) -> str:
        """SHA-256 of the job's canonical JSON, less what came later and is off: what a plan records as its origin.

        Host time is not in it: it is measured anew with every release, and makes another plan only where a stage is host-bound.
        """
        parts = {"model": self.model, "parallel": self.parallel, "budget": self.budget, "optimizer": self.optimizer}
        parts |= {"batch": self.batch}
        off = left_out(parts, self.overlap, self.cluster, fp8=self.model.fp8 is not None)
        off["learned"] = True
        if self.head is None:
            off["head"] = True
        return hashlib.sha256(self.model_dump_json(by_alias=True, exclude=off).encode()).hexdigest()


def _nearest(number: int, step: int) -> str:
    """What a size could be instead: the multiples of `step` around it."""
    below = number // step * step
    return f"such as {below} or {below + step}" if below else f"such as {step}"
