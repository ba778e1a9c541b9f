"""What a release of torch makes of variables that plans and launches set: known here, so that nobody finds out on eight nodes.

below 2.8     a collective that is issued asynchronously, as in a window, keeps its operands by `record_stream`: memory comes back
              when the host sees the collective over, not where the device's order allows it (pytorch #111431, mended by #150398).
              `TORCH_NCCL_AVOID_RECORD_STREAMS=1` keeps them by reference instead
below 2.11    expandable segments and the memory pool of `--use-nccl-ub` do not go together: Megatron raises
"""

from __future__ import annotations

import re
from collections.abc import Mapping

AVOIDS_RECORDING = "TORCH_NCCL_AVOID_RECORD_STREAMS"
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variables that configure torch's allocator, the newer name first."""
GROWING = "expandable_segments:True"
YES = ("1", "true", "t", "yes", "y")
"""What torch takes for a yes, in any case."""


def minor(version: str) -> tuple[int, int]:
    """(2, 7) of `2.7.1+cu126`; (0, 0) of what is no version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def records_operands(torch: str, variables: Mapping[str, str]) -> bool:
    """Whether NCCL's asynchronous collectives keep their operands until the host sees them over."""
    return minor(torch) < (2, 8) and variables.get(AVOIDS_RECORDING, "").lower() not in YES


def nccl_ub_stands_alone(torch: str, megatron_core: str) -> bool:
    """Whether Megatron raises for `--use-nccl-ub` beside expandable segments. Before 0.18 it does so whatever torch is."""
    return minor(torch) < (2, 11) or minor(megatron_core) < (0, 18)
