"""Environment variables of torch and Transformer Engine that plans depend on, with effects that differ by release.

TORCH_NCCL_AVOID_RECORD_STREAMS   below torch 2.8 an asynchronous collective, as in a window, retains its operands by
                                  `record_stream`: memory is free when the host sees the collective complete, not in the device's
                                  order (pytorch #111431, fixed by #150398). `=1` retains them by reference instead
PYTORCH_ALLOC_CONF                below torch 2.11 expandable segments exclude the memory pool of `--use-nccl-ub`: Megatron raises
NVTE_*_LAYERNORM_SM_MARGIN        norms with several thread blocks per row are *cooperative* launches: all blocks start together.
                                  While an NCCL kernel occupies some multiprocessors, such a norm waits for the end of the
                                  collective, and a recomputation that begins with it hides nothing. With a *margin* the kernel
                                  leaves that many multiprocessors free, and overlaps

Source: Transformer Engine 2.4 to 2.18, whose tables are equal: `launch_*_tuned_` and `launch_*_general_` in
`common/normalization/*/*_cuda_kernel.cu`, and `pytorch/csrc/extensions/normalization.cpp`. Modules read the margin when they are
built. Untested on a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

AVOIDS_RECORDING = "TORCH_NCCL_AVOID_RECORD_STREAMS"
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variables that configure torch's allocator, the newer name first."""
GROWING = "expandable_segments:True"
YES = ("1", "true", "t", "yes", "y")

Norm = Literal["layernorm", "rmsnorm"]

FORWARD_MARGIN = "NVTE_FWD_LAYERNORM_SM_MARGIN"
"""Environment variable: multiprocessors that norms of either kind leave free in forward. Transformer Engine's default is 0."""

USUAL_MARGIN = 16
"""Value in Megatron-LM's examples (`examples/rl/model_configs/common.sh`). It should be at least the multiprocessors of NCCL's
kernels, one per channel."""

ONE_BLOCK = 8192
"""The longest row with one thread block in forward, for both norms."""
OWN_KERNEL = 10240
"""A longer one with one thread block, for LayerNorm in 16 bits."""


def version_of(*names: str) -> str | None:
    """The version of a package under the first of its names that is installed. Imports nothing."""
    for name in names:
        with suppress(PackageNotFoundError):
            return version(name)
    return None


def minor(version: str) -> tuple[int, int]:
    """(2, 7) of `2.7.1+cu126`; (0, 0) if it is no version."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def switched_on(variables: Mapping[str, str], name: str) -> bool:
    """Whether torch reads a variable as true."""
    return variables.get(name, "").lower() in YES


def records_operands(torch: str, variables: Mapping[str, str]) -> bool:
    """Whether NCCL's asynchronous collectives retain their operands until the host sees them complete."""
    return minor(torch) < (2, 8) and not switched_on(variables, AVOIDS_RECORDING)


def nccl_ub_stands_alone(torch: str, megatron_core: str) -> bool:
    """Whether Megatron raises for `--use-nccl-ub` with expandable segments. Before 0.18 it does so with every torch."""
    return minor(torch) < (2, 11) or minor(megatron_core) < (0, 18)


def starts_as_one(norm: Norm, width: int, *, half_precision: bool = True) -> bool:
    """Whether a norm's forward over rows of `width` elements is launched cooperatively. `half_precision`: bf16 or fp16."""
    own_kernel = norm == "layernorm" and width == OWN_KERNEL and half_precision
    return width > ONE_BLOCK and not own_kernel
