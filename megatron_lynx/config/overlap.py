"""What a job communicates beside its computing, as the flags of its launch say it.

                                                                       flag
    reductions of gradients     behind the last micro-batch's backward --overlap-grad-reduce, --ddp-bucket-size,
                                                                       --ddp-num-buckets, --ddp-pad-buckets-for-high-nccl-busbw
    gathers of parameters       behind the first forward               --overlap-param-gather
    a linear's gradient         behind its weight's gradient           unless --no-async-tensor-model-parallel-allreduce
    messages between chunks     behind passes                          unless --no-overlap-p2p-communication
    tensor-parallel exchanges   behind pieces of their own GEMM        --tp-comm-overlap (userbuffers)
    any of them                 behind weight gradients of other       a plan, unless --no-gradient-accumulation-fusion,
                                layers, deferred                       --delay-wgrad-compute

Whatever is not hidden holds a step up.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megatron_lynx.validation import Part


class Overlap(Part):
    """Everything has the value that jobs had before they could say it."""

    gradients: bool = False
    """Whether gradients are reduced bucket by bucket while the last micro-batch's backward goes on."""
    bucket_parameters: int | None = Field(default=None, ge=1)
    """How many parameters a bucket has at least before it is reduced. None: Megatron's own, 40 million, or a million for each
    rank that shares them if that is more. Where reductions do not overlap there are no buckets, and it means nothing."""
    buckets: int | None = Field(default=None, ge=1)
    """Into how many buckets a rank's parameters are cut, in place of `bucket_parameters`."""
    padded_buckets: bool = False
    """Whether the distributed optimizer's buckets are filled up to multiples of 65536 numbers, for more bandwidth of NCCL."""
    parameters: bool = False
    """Whether the distributed optimizer's parameters are gathered while the first forward of the next step goes on."""
    linears: bool = True
    """Whether the gradient of a column-parallel linear's input is reduced beside the GEMM of its weight's gradient. With sequence
    parallelism Megatron always does that."""
    messages: bool = True
    """Whether stages with several chunks exchange messages behind passes. Stages with one chunk never do."""
    userbuffers: bool = False
    """Whether Transformer Engine cuts tensor-parallel exchanges and their GEMMs into pieces that overlap. How much that hides
    nobody can say beforehand: the step is priced as a range."""
    weight_gradients: Literal["auto", "none", "deferred"] = "auto"
    """Whether a plan may defer weight gradients into waits. That takes Megatron's fused weight gradients (its default on GPUs) or
    Transformer Engine's store of them. auto: on a GPU, but not on the testbed; deferred: everywhere."""

    @model_validator(mode="after")
    def _sensible(self) -> Overlap:
        if self.parameters and not self.gradients:
            raise ValueError("parameters true needs gradients: true (--overlap-grad-reduce), found false, as Megatron refuses it")
        if self.buckets is not None and self.bucket_parameters is not None:
            found = f"found {self.buckets} and {self.bucket_parameters}"
            raise ValueError(f"buckets and bucket_parameters: needed one of them, {found}, as Megatron refuses both")
        return self
