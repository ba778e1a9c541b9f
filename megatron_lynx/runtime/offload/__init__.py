"""Moves activations to host memory, and back for their backward."""

from megatron_lynx.runtime.offload.host_memory import HostFacts, HostLimit, limit_of
from megatron_lynx.runtime.offload.offloader import Offloader, OffloadGroup, OffloadPolicy
from megatron_lynx.runtime.offload.storage import OffloadedTensor, on_device

__all__ = ["OffloadedTensor", "HostFacts", "HostLimit", "OffloadPolicy", "Offloader", "OffloadGroup", "limit_of", "on_device"]
