"""Effects of environment variables that depend on the release of torch.

below 2.8     an asynchronous collective, as in a window, retains its operands by `record_stream`: memory is free when the host
              sees the collective complete, not in the device's order (pytorch #111431, fixed by #150398).
              `TORCH_NCCL_AVOID_RECORD_STREAMS=1` retains them by reference instead
below 2.11    expandable segments exclude the memory pool of `--use-nccl-ub`: Megatron raises
"""

from __future__ import annotations

import re
from collections.abc import Mapping

AVOIDS_RECORDING = "TORCH_NCCL_AVOID_RECORD_STREAMS"
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variables that configure torch's allocator, the newer name first."""
GROWING = "expandable_segments:True"
YES = ("1", "true", "t", "yes", "y")
"""Values that torch reads as true, in any case."""


def minor(version: str) -> tuple[int, int]:
    """(2, 7) of `2.7.1+cu126`; (0, 0) if it is no version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def records_operands(torch: str, variables: Mapping[str, str]) -> bool:
    """Whether NCCL's asynchronous collectives retain their operands until the host sees them complete."""
    return minor(torch) < (2, 8) and variables.get(AVOIDS_RECORDING, "").lower() not in YES


def nccl_ub_stands_alone(torch: str, megatron_core: str) -> bool:
    """Whether Megatron raises for `--use-nccl-ub` with expandable segments. Before 0.18 it does so with every torch."""
    return minor(torch) < (2, 11) or minor(megatron_core) < (0, 18)
