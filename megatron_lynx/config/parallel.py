"""How a job is spread over ranks."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Parallel(BaseModel):
    """Sizes of Megatron's parallel groups. Data parallelism is what remains of the job's ranks."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    tensor: int = Field(default=1, ge=1)
    pipeline: int = Field(default=1, ge=1)
    sequence_parallel: bool = False
    """Whether norms and dropouts work on a slice of the sequence (needs tensor > 1)."""
    distributed_optimizer: bool = False
    """Whether optimizer state is sharded over data-parallel ranks."""

    @model_validator(mode="after")
    def _sensible(self) -> Parallel:
        if self.sequence_parallel and self.tensor == 1:
            raise ValueError("sequence_parallel needs tensor > 1, found tensor 1")
        return self

    @property
    def ranks(self) -> int:
        """Ranks of one model replica."""
        return self.tensor * self.pipeline
