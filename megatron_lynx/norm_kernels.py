"""Which norms of Transformer Engine start on all multiprocessors at once, or not at all.

    row of up to 8192     one block of threads works on it     blocks start wherever there is room
    a longer row          several blocks share it              *cooperative*: all blocks, as many as fit the GPU, start together

While a kernel of NCCL holds some multiprocessors, a cooperative kernel does not fit. It waits until the collective is over, and
everything behind it in its stream with it: a replay that begins with such a norm hides nothing. With a *margin* the kernel leaves
so many multiprocessors free, and fits beside the collective.

Read in Transformer Engine's sources, whose tables are equal from 2.4 to 2.18: `launch_*_tuned_` and `launch_*_general_` in
`common/normalization/*/*_cuda_kernel.cu` launch cooperatively where a row has more than one block, and the tables below them say
for which widths. A width without a kernel of its own has the general one, which starts no more blocks than there are rows: with
few rows it may fit all the same. The margin is taken off the number of multiprocessors for which a kernel is launched
(`pytorch/csrc/extensions/normalization.cpp`); modules read it when they are made. No GPU has shown any of this here.
"""

from __future__ import annotations

from typing import Literal

Norm = Literal["layernorm", "rmsnorm"]

FORWARD_MARGIN = "NVTE_FWD_LAYERNORM_SM_MARGIN"
BACKWARD_MARGIN = "NVTE_BWD_LAYERNORM_SM_MARGIN"
"""Environment variables: multiprocessors that norms of either kind leave free. Transformer Engine's default is 0."""

USUAL_MARGIN = 16
"""What Megatron-LM's examples set (`examples/rl/model_configs/common.sh`). It should not be less than what NCCL's kernels hold, a
multiprocessor for each of their channels."""

CUDNN = "NVTE_NORM_FWD_USE_CUDNN"
"""Environment variable: norms are cuDNN's. How these start is not known here."""

ONE_BLOCK = 8192
"""The longest row that one block of a forward works on, whatever the norm."""
OWN_KERNEL = 10240
"""A longer one for which LayerNorm, in 16 bits, has a kernel with one block."""


def starts_as_one(norm: Norm, width: int, *, half_precision: bool = True) -> bool:
    """Whether a norm's forward over rows of `width` elements is launched cooperatively. `half_precision`: of bf16 or fp16."""
    own = norm == "layernorm" and width == OWN_KERNEL and half_precision
    return width > ONE_BLOCK and not own
