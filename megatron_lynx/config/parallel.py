"""Parallel sizes of a job."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatron_lynx.validation import Part

ContextExchange = Literal["p2p", "all_gather", "a2a", "a2a+p2p"]
"""Exchange of keys and values between context-parallel ranks (Megatron's `--cp-comm-type`).

p2p          a ring: each rank passes on its block while it computes on the one it received
all_gather   each rank gathers all of them before attention, and again in backward
a2a          all-to-all from a part of the sequence with all heads to the whole sequence with a part of the heads, and back
a2a+p2p      a2a within groups, p2p between them
"""


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

    @model_validator(mode="after")
    def _sensible(self) -> Parallel:
        problems = []
        if self.sequence_parallel and self.tensor == 1:
            problems.append("sequence_parallel needs tensor > 1, found tensor 1")
        if self.scattered_messages and self.sequence_parallel:
            problems.append("scattered_messages needs sequence_parallel: false, found true: messages are parts already")
        problems += _level_problems(self)
        if self.optimizer_instances > 1 and not self.distributed_optimizer:
            problems.append(f"optimizer_instances ({self.optimizer_instances}) needs distributed_optimizer: true, found false")
        if self.layers_per_chunk is not None and self.pipeline == 1:
            problems.append("layers_per_chunk needs pipeline > 1, found pipeline 1")
        if self.microbatch_group is not None:
            problems += _group_problems(self.microbatch_group, self)
        if isinstance(self.partition, tuple):
            problems += _partition_problems(self.partition, self.pipeline, self.layers_per_chunk)
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def expert_tensor_size(self) -> int:
        """Ranks that split each expert."""
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
        """Ranks of one model replica."""
        return self.tensor * self.context * self.pipeline


def _level_problems(parallel: Parallel) -> list[str]:
    levels, context = parallel.context_levels, parallel.context
    if parallel.context_exchange != "a2a+p2p":
        return [] if levels is None else [f"context_levels {list(levels)} needs context_exchange a2a+p2p"]
    if levels is None:
        return ["context_exchange a2a+p2p needs context_levels: ranks of a group, and groups"]
    if min(levels) < 1 or levels[0] * levels[1] != context:
        return [f"context_levels {list(levels)} must be two sizes whose product is context ({context})"]
    return []


def _group_problems(group: int, parallel: Parallel) -> list[str]:
    partition = parallel.partition if isinstance(parallel.partition, tuple) else ()
    if parallel.layers_per_chunk is None and len(partition) <= parallel.pipeline:
        return [f"microbatch_group ({group}) needs several chunks on each stage, found one: give layers_per_chunk too"]
    if group < parallel.pipeline:
        return [f"microbatch_group ({group}) must be at least pipeline ({parallel.pipeline})"]
    return []


def _partition_problems(partition: tuple[int, ...], pipeline: int, layers_per_chunk: int | None) -> list[str]:
    problems = []
    if layers_per_chunk is not None:
        problems.append(f"partition {list(partition)} and layers_per_chunk {layers_per_chunk} are both given, give one of them")
    if pipeline == 1 and len(partition) > 1:
        problems.append(f"partition has {len(partition)} numbers, but pipeline 1 has one stage, and needs one")
    elif not partition or len(partition) % pipeline:
        problems.append(f"partition has {len(partition)} numbers, but pipeline {pipeline} needs a multiple of {pipeline}")
    return problems
