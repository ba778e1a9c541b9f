"""Communication that overlaps computation, and the launch flags that enable it.

                                overlapped with                        flag
    gradient reductions         last micro-batch's backward            --overlap-grad-reduce, --ddp-bucket-size,
                                                                       --ddp-num-buckets, --ddp-pad-buckets-for-high-nccl-busbw
    parameter gathers           first forward                          --overlap-param-gather
    a linear's input gradient   its weight gradient                    unless --no-async-tensor-model-parallel-allreduce
    messages between chunks     passes                                 unless --no-overlap-p2p-communication
    tensor-parallel exchanges   pieces of their own GEMM               --tp-comm-overlap (userbuffers)
    any of them                 delayed weight gradients of other      a plan, unless --no-gradient-accumulation-fusion,
                                layers                                 --delay-wgrad-compute

All other communication is exposed.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megatron_lynx.validation import Part


class Overlap(Part):
    """Defaults are the behaviour of jobs written before these fields existed."""

    gradients: bool = False
    """Whether gradients are reduced by bucket during the last micro-batch's backward."""
    bucket_parameters: int | None = Field(default=None, ge=1)
    """Minimum parameters per bucket; None: Megatron's default, the larger of 40 million and a million per rank that shares them.
    Unused without overlapped reductions."""
    buckets: int | None = Field(default=None, ge=1)
    """Number of buckets of a rank's parameters, instead of `bucket_parameters`."""
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

    @model_validator(mode="after")
    def _sensible(self) -> Overlap:
        if self.parameters and not self.gradients:
            raise ValueError("parameters true needs gradients: true (--overlap-grad-reduce), found false, as Megatron refuses it")
        if self.buckets is not None and self.bucket_parameters is not None:
            found = f"found {self.buckets} and {self.bucket_parameters}"
            raise ValueError(f"buckets and bucket_parameters: needed one of them, {found}, as Megatron refuses both")
        return self
