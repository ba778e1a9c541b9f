"""How a job is spread over ranks."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Parallel(BaseModel):
    """Sizes of Megatron's parallel groups. Data parallelism is what remains of the job's ranks."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    tensor: int = Field(default=1, ge=1)
    context: int = Field(default=1, ge=1)
    """Ranks among which a sequence is cut (c)."""
    pipeline: int = Field(default=1, ge=1)
    layers_per_chunk: int | None = Field(default=None, ge=1)
    """Layers of one virtual stage (l); none: one chunk per stage, plain 1F1B."""
    sequence_parallel: bool = False
    """Whether norms and dropouts work on a slice of the sequence (needs tensor > 1)."""
    distributed_optimizer: bool = False
    """Whether optimizer state is sharded over the ranks that share parameters (context x data parallel)."""

    @model_validator(mode="after")
    def _sensible(self) -> Parallel:
        problems = []
        if self.sequence_parallel and self.tensor == 1:
            problems.append("sequence_parallel needs tensor > 1, found tensor 1")
        if self.layers_per_chunk is not None and self.pipeline == 1:
            problems.append("layers_per_chunk needs pipeline > 1, found pipeline 1")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def ranks(self) -> int:
        """Ranks of one model replica."""
        return self.tensor * self.context * self.pipeline
