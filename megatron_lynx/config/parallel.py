"""Parallel sizes, overlapped communication and optimizer of a job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from megatron_lynx.validation import Part

ContextExchange = Literal["p2p", "all_gather", "a2a", "a2a+p2p"]
"""Exchange of keys and values between context-parallel ranks, as in Megatron's `--cp-comm-type`. a2a+p2p: a2a within groups, p2p
between them."""


class Parallel(Part):
    """Sizes of Megatron's parallel groups. The remaining factor of the job's ranks is data parallelism."""

    tensor: int = Field(default=1, ge=1)
    context: int = Field(default=1, ge=1)
    """Ranks that split a sequence (c)."""
    context_exchange: ContextExchange = "p2p"
    context_levels: tuple[int, int] | None = None
    """a2a+p2p only: ranks per group, and groups (Megatron's `--hierarchical-context-parallel-sizes`)."""
    expert: int = Field(default=1, ge=1)
    """Ranks that share a layer's experts (EP)."""
    expert_tensor: int | None = Field(default=None, ge=1)
    """Ranks that split each expert (ETP); None: as `tensor`."""
    pipeline: int = Field(default=1, ge=1)
    layers_per_chunk: int | None = Field(default=None, ge=1)
    """Layers of one virtual stage (l); None: one chunk per stage, plain 1F1B."""
    partition: Literal["auto"] | tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Layers of every virtual stage, in layer order, if they differ: p numbers, or p x v with v chunks per stage.

    Virtual stage k is chunk k // p of stage k % p. A chunk may have no layers, only the embedding, the loss, or nothing. If None:
    equal. auto: as equal as possible, until a plan chooses the fastest (with `layers_per_chunk`, with as many chunks).
    """
    microbatch_group: int | None = Field(default=None, ge=1)
    """Consecutive micro-batches per chunk (interleaved 1F1B); None: as many as stages."""
    sequence_parallel: bool = False
    """Whether norms and dropouts work on a slice of the sequence (needs tensor > 1)."""
    scattered_messages: bool = False
    """Whether each tensor-parallel rank sends a part of a message between stages, gathered by the receivers. Sequence parallelism
    splits messages already."""
    distributed_optimizer: bool = False
    """Whether optimizer state is sharded over the ranks that share parameters (context x data parallel)."""
    optimizer_instances: int = Field(default=1, ge=1)
    """Groups of these ranks that each shard the whole state (`--num-distributed-optimizer-instances`). Gradients are reduced
    within a group, then between groups."""

    def _problems(self) -> Iterator[str]:
        if self.sequence_parallel and self.tensor == 1:
            yield "sequence_parallel needs tensor > 1, found tensor 1"
        if self.scattered_messages and self.sequence_parallel:
            yield "scattered_messages needs sequence_parallel: false, found true: messages are parts already"
        levels = self.context_levels
        if self.context_exchange != "a2a+p2p":
            if levels is not None:
                yield f"context_levels {list(levels)} needs context_exchange a2a+p2p"
        elif levels is None:
            yield "context_exchange a2a+p2p needs context_levels: ranks of a group, and groups"
        elif min(levels) < 1 or levels[0] * levels[1] != self.context:
            yield f"context_levels {list(levels)} must be two sizes whose product is context ({self.context})"
        if self.optimizer_instances > 1 and not self.distributed_optimizer:
            yield f"optimizer_instances ({self.optimizer_instances}) needs distributed_optimizer: true, found false"
        if self.layers_per_chunk is not None and self.pipeline == 1:
            yield "layers_per_chunk needs pipeline > 1, found pipeline 1"
        partition = self.partition if isinstance(self.partition, tuple) else None
        if (group := self.microbatch_group) is not None:
            if self.layers_per_chunk is None and len(partition or ()) <= self.pipeline:
                yield f"microbatch_group ({group}) needs several chunks on each stage, found one: give layers_per_chunk too"
            elif group < self.pipeline:
                yield f"microbatch_group ({group}) must be at least pipeline ({self.pipeline})"
        if partition is not None:
            yield from _partition_problems(partition, self.pipeline, self.layers_per_chunk)

    @property
    def expert_tensor_size(self) -> int:
        return self.expert_tensor or self.tensor

    @property
    def context_groups(self) -> tuple[int, int]:
        """Context-parallel ranks of the all-to-all and of the ring: (1, c) with p2p, (c, 1) with a2a. Their product is c; unused
        with all_gather."""
        if self.context_exchange == "a2a+p2p" and self.context_levels is not None:
            return self.context_levels
        return (self.context, 1) if self.context_exchange == "a2a" else (1, self.context)

    @property
    def ranks(self) -> int:
        return self.tensor * self.context * self.pipeline


def _partition_problems(partition: tuple[int, ...], pipeline: int, layers_per_chunk: int | None) -> Iterator[str]:
    if layers_per_chunk is not None:
        yield f"partition {list(partition)} and layers_per_chunk {layers_per_chunk} are both given, give one of them"
    if pipeline == 1 and len(partition) > 1:
        yield f"partition has {len(partition)} numbers, but pipeline 1 has one stage, and needs one"
    elif not partition or len(partition) % pipeline:
        yield f"partition has {len(partition)} numbers, but pipeline {pipeline} needs a multiple of {pipeline}"


class Overlap(Part):
    """Communication that overlaps computation; all other is exposed. Defaults are those of jobs written before these fields."""

    gradients: bool = False
    """Whether gradients are reduced by bucket during the last micro-batch's backward."""
    aligned: bool = True
    """Whether stages begin their reductions together (--no-align-grad-reduce: they do not): after the last backward, except on
    the first stage of 1F1B. Unused without overlapped reductions."""
    bucket_parameters: int | None = Field(default=None, ge=1)
    """Minimum parameters per bucket; None: Megatron's default, the larger of 40 million and a million per rank that shares them.
    Unused without overlapped reductions."""
    buckets: int | None = Field(default=None, ge=1)
    padded_buckets: bool = False
    """Whether the distributed optimizer's buckets are padded to multiples of 65536 values for NCCL bandwidth."""
    parameters: bool = False
    """Whether the distributed optimizer's parameters are gathered during the first forward of the next step."""
    linears: bool = True
    """Whether a column-parallel linear's input gradient is reduced during its weight-gradient GEMM. Always with sequence
    parallelism."""
    messages: bool = True
    """Whether stages with several chunks overlap messages with passes. Stages with one chunk never do."""
    userbuffers: bool = False
    """Whether Transformer Engine overlaps pieces of tensor-parallel exchanges with pieces of their GEMMs. Its gain cannot be
    predicted, so the step is priced as a range."""
    weight_gradients: Literal["auto", "none", "deferred"] = "auto"
    """Whether a plan may delay weight gradients into waits. Needs Megatron's fused weight gradients (default on GPUs) or
    Transformer Engine's store. auto: on GPUs, not on the testbed; deferred: everywhere."""
    weight_gradient_pieces: bool = True
    """Whether a plan may cut delayed weight gradients into pieces (not with `--whole-weight-gradients`). Bits are compared before
    training: a shape that differs stays whole, and the plan gains less."""

    def _problems(self) -> Iterator[str]:
        if self.parameters and not self.gradients:
            yield "parameters true needs gradients: true (--overlap-grad-reduce), found false, as Megatron refuses it"
        if self.buckets is not None and self.bucket_parameters is not None:
            finding = f"found {self.buckets} and {self.bucket_parameters}"
            yield f"buckets and bucket_parameters: needed one of them, {finding}, as Megatron refuses both"


ADAMS = 2
Moment = Literal["fp32", "bf16", "fp16", "fp8"]


class Optimizer(Part):
    """The optimizer and its state per parameter. `cost.parameters` computes the bytes."""

    gradients: Literal["fp32", "bf16"] = "fp32"
    """Type in which gradients are accumulated and reduced. bf16: the weights' own type, bf16 or fp16."""
    states: int = Field(default=ADAMS, ge=0, le=8)
    """Optimizer states per parameter, besides the main parameter: two for Adam, one for SGD with momentum and Lion, three for
    AdEMAMix."""
    muon_steps: int = Field(default=0, ge=0, le=100)
    """Newton-Schulz steps of Muon for the weights of layers (`cost.muon`); 0: no Muon."""
    matrix_states: int = Field(default=1, ge=0, le=8)
    """States per weight that Muon updates: momentum, and a second moment with `adaptive_muon`."""
    precision_aware: bool = False
    """Whether Transformer Engine's Adam reads gradients in their type, and stores main parameters and moments itself."""
    main_parameters: Literal["fp32", "remainder", "fp16"] = "fp32"
    """Type of main parameters. remainder: the low half of fp32 that bf16 weights lack, as in a precision-aware optimizer."""
    first_moment: Moment = "fp32"
    second_moment: Moment = "fp32"
    offload: Literal["auto"] | Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of a rank's parameters that is updated on the host. auto: the fastest share; 0 until the planner chooses."""
    overlap_copies: bool = False
    states_on_host: float = Field(default=0.0, ge=0, le=1)
    """Share of main parameters and moments in host memory between updates, which run on the device
    (`--chunked-optimizer-state-offload`)."""
    chunk_mib: int = Field(default=0, ge=0)
    """MiB of moments restored per chunk, two of which are on the device; 0: all at once."""

    def _problems(self) -> Iterator[str]:
        smaller = {
            name: value
            for name in ("main_parameters", "first_moment", "second_moment")
            if (value := getattr(self, name)) != "fp32"
        }
        if smaller and not self.precision_aware:
            settings = ", ".join(f"{name} {value}" for name, value in smaller.items())
            yield f"{settings} needs precision_aware: true (--use-precision-aware-optimizer), found false"
        if self.precision_aware and self.muon_steps:
            yield f"precision_aware: true needs muon_steps 0, found {self.muon_steps}: it is Transformer Engine's Adam"
        if self.precision_aware and self.states != ADAMS:
            yield f"precision_aware: true needs states {ADAMS}, found {self.states}: it is Transformer Engine's Adam"
        if self.states_on_host and self.offload != 0:
            settings = f"states_on_host {self.states_on_host:g} and offload {self.offload}"
            yield f"{settings}: one of them, as Megatron refuses both"
        if self.offload != 0 and not self.precision_aware:
            settings = f"offload {self.offload} needs precision_aware: true (--use-precision-aware-optimizer)"
            yield f"{settings}, found false, as Megatron refuses it"

    @property
    def offloaded(self) -> float:
        return 0.0 if self.offload == "auto" else self.offload

    @property
    def on_host(self) -> bool:
        return bool(self.offloaded or self.states_on_host)
