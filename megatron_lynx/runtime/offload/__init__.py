"""What a chunk's layers keep of one micro-batch waits in host memory for its backward, as far as the plan says."""

from megatron_lynx.runtime.offload.host_limit import HostFacts, HostLimit, limit_of
from megatron_lynx.runtime.offload.offloader import Offloader
from megatron_lynx.runtime.offload.parcel import Hosted, on_device
from megatron_lynx.runtime.offload.shipment import OffloadPolicy, Shipment

__all__ = ["Hosted", "HostFacts", "HostLimit", "OffloadPolicy", "Offloader", "Shipment", "limit_of", "on_device"]
