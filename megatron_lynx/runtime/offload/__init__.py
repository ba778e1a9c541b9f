"""Sends what a plan says of a micro-batch's activations to host memory, and brings it back for their backward."""

from megatron_lynx.runtime.offload.group import OffloadedTensor, OffloadGroup, OffloadPolicy, on_device
from megatron_lynx.runtime.offload.host_memory import HostFacts, HostLimit, limit_of
from megatron_lynx.runtime.offload.offloader import Offloader

__all__ = ["OffloadedTensor", "HostFacts", "HostLimit", "OffloadPolicy", "Offloader", "OffloadGroup", "limit_of", "on_device"]
