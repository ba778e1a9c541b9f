"""How a job is spread over ranks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatron_lynx.validation import Part


class Parallel(Part):
    """Sizes of Megatron's parallel groups. Data parallelism is what remains of the job's ranks."""

    tensor: int = Field(default=1, ge=1)
    context: int = Field(default=1, ge=1)
    """Ranks among which a sequence is cut (c)."""
    expert: int = Field(default=1, ge=1)
    """Ranks among which a layer's experts are shared out (EP)."""
    expert_tensor: int | None = Field(default=None, ge=1)
    """Ranks among which each expert is cut (ETP); none: as many as `tensor`."""
    pipeline: int = Field(default=1, ge=1)
    layers_per_chunk: int | None = Field(default=None, ge=1)
    """Layers of one virtual stage (l); none: one chunk per stage, plain 1F1B."""
    partition: Literal["auto"] | tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Layers of every virtual stage, in layer order, where they differ: p numbers, or p x v with v chunks on each stage.

    Virtual stage k is chunk k // p of stage k % p. A chunk may have no layers: the embedding, the loss, or nothing.
    None: all alike. auto: as even as may be, until a plan says what is fastest (with `layers_per_chunk`, of as many chunks)."""
    microbatch_group: int | None = Field(default=None, ge=1)
    """Micro-batches that pass one chunk before the next one has its turn (interleaved 1F1B); none: as many as stages."""
    sequence_parallel: bool = False
    """Whether norms and dropouts work on a slice of the sequence (needs tensor > 1)."""
    scattered_messages: bool = False
    """Whether each tensor-parallel rank sends a part of a message between stages, and the receivers gather it: what Megatron did
    before it had sequence parallelism, under which messages are parts from the beginning."""
    distributed_optimizer: bool = False
    """Whether optimizer state is sharded over the ranks that share parameters (context x data parallel)."""

    @model_validator(mode="after")
    def _sensible(self) -> Parallel:
        problems = []
        if self.sequence_parallel and self.tensor == 1:
            problems.append("sequence_parallel needs tensor > 1, found tensor 1")
        if self.scattered_messages and self.sequence_parallel:
            problems.append("scattered_messages needs sequence_parallel: false, found true: messages are parts already")
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
        """Ranks among which each expert is cut."""
        return self.expert_tensor or self.tensor

    @property
    def ranks(self) -> int:
        """Ranks of one model replica."""
        return self.tensor * self.context * self.pipeline


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
