"""What runs on a rank, where the stand-in answers for CUDA: its streams do everything at once, so this shows calls, not order."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron_lynx.runtime.device import CudaDevice

HERE = torch.device("cpu")


def with_streams(device: CudaDevice) -> CudaDevice:
    """There is no driver that makes them."""
    device._streams = {name: torch.cuda.Stream() for name in ("offload", "reload")}
    return device


def there_and_back_on_streams(rank: int) -> dict[str, bool]:
    from megatron_lynx.runtime.device import CudaDevice, Trace, copiers_for

    device = with_streams(CudaDevice(HERE))
    out, back = copiers_for(device, Trace(device))
    source = torch.arange(100, dtype=torch.uint8)
    host, returned, held = torch.zeros_like(source), torch.zeros_like(source), weakref.ref(source)
    leaving = out.start([(host, source)], 0)
    del source
    coming = back.start([(returned, host)], 0, after=(leaving, None))
    back.wait(coming)
    for copier in (out, back):
        device.synchronize()
        copier.settle()
        copier.close()
    return {
        "equal": torch.equal(returned, torch.arange(100, dtype=torch.uint8)),
        "done": leaving.done and coming.done,
        "counted": (out.take_bytes(), back.take_bytes(), out.take_bytes()) == (100, 100, 0),
        "no wait": back.take_waited_s() == 0,
        "lets go": held() is None,
    }


def a_graph_that_is_dropped_on_streams(rank: int) -> tuple[bool, bool]:
    """Whether the original is held before things are settled, and behind that."""
    import numpy as np

    from megatron_lynx.runtime.device import CudaDevice, copiers_for, device_for
    from megatron_lynx.runtime.host_memory import HostLimit
    from megatron_lynx.runtime.offload import Offloader, OffloadPolicy

    made = Offloader({0: OffloadPolicy(10**4, 1, 1)}, device=device_for(HERE), limit=HostLimit(10**6))
    made.copiers = made.out, made.back = copiers_for(with_streams(CudaDevice(HERE)), made.trace)
    bytes_of_it = np.arange(100, dtype=np.uint8)
    held = weakref.ref(bytes_of_it)
    group = made.open(0, 0)
    handle = group.push(torch.from_numpy(bytes_of_it))
    del bytes_of_it
    made.leave(group, None)
    del handle
    before = held() is not None
    made.settle()
    behind = held() is not None
    made.close()
    return before, behind
