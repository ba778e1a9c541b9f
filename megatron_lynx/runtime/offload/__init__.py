"""What a chunk's layers keep of one micro-batch waits in host memory for its backward, as far as the plan says."""

from megatron_lynx.runtime.offload.host_memory import available_bytes
from megatron_lynx.runtime.offload.offloader import Offloader
from megatron_lynx.runtime.offload.parcel import Hosted, on_device
from megatron_lynx.runtime.offload.shipment import OffloadPolicy, Shipment

__all__ = ["Hosted", "OffloadPolicy", "Offloader", "Shipment", "available_bytes", "on_device"]
