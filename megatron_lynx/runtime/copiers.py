"""Which copiers a device has."""

from __future__ import annotations

import torch

from megatron_lynx.runtime.stream_copier import StreamCopier
from megatron_lynx.runtime.thread_copier import ThreadCopier
from megatron_lynx.runtime.trace import Trace
from megatron_lynx.runtime.transfer import Copier


def copiers_for(device: torch.device, trace: Trace) -> tuple[Copier, Copier]:
    """(to the host, back) for a device."""
    if device.type == "cuda":
        return StreamCopier("offload", trace, device), StreamCopier("reload", trace, device)
    return ThreadCopier("offload", trace), ThreadCopier("reload", trace)
