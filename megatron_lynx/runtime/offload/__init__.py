"""What a chunk's layers keep of one micro-batch waits in host memory for its backward, as far as the plan says."""

from megatron_lynx.runtime.offload.group import OffloadedTensor, OffloadGroup, OffloadPolicy, on_device
from megatron_lynx.runtime.offload.host_memory import HostFacts, HostLimit, limit_of
from megatron_lynx.runtime.offload.offloader import Offloader

__all__ = ["OffloadedTensor", "HostFacts", "HostLimit", "OffloadPolicy", "Offloader", "OffloadGroup", "limit_of", "on_device"]
