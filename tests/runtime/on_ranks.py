"""What runs on a rank, where the stand-in answers for CUDA: its streams do everything at once, so this shows calls, not order."""

from __future__ import annotations

import weakref

import torch


def there_and_back_on_streams(rank: int) -> dict[str, bool]:
    from megatron_lynx.runtime.stream_copier import StreamCopier
    from megatron_lynx.runtime.trace import Trace
    from megatron_lynx.runtime.transfer import Owner

    device, owner = torch.device("cpu"), Owner("stage 0", 0)
    out, back = StreamCopier("offload", Trace(), device), StreamCopier("reload", Trace(), device)
    source = torch.arange(100, dtype=torch.uint8)
    host, returned, held = torch.zeros_like(source), torch.zeros_like(source), weakref.ref(source)
    leaving = out.start(host, source, owner)
    del source
    coming = back.start(returned, host, owner, after=(leaving, None))
    back.wait(coming)
    for copier in (out, back):
        copier.drain()
        copier.cancel()
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

    from megatron_lynx.runtime.offload import Offloader
    from megatron_lynx.runtime.shipment import OffloadPolicy
    from megatron_lynx.runtime.stream_copier import StreamCopier
    from megatron_lynx.runtime.trace import Trace

    device = torch.device("cpu")
    made = Offloader({0: OffloadPolicy(10**4, 1, 1, 1)}, device=device, limit_bytes=10**6)
    made.out, made.back = (StreamCopier(direction, Trace(), device) for direction in ("offload", "reload"))
    bytes_of_it = np.arange(100, dtype=np.uint8)
    held = weakref.ref(bytes_of_it)
    shipment = made.open(0, 0)
    handle = shipment.stow(torch.from_numpy(bytes_of_it))
    del bytes_of_it
    made.depart(shipment, None)
    del handle
    before = held() is not None
    made.settle()
    behind = held() is not None
    made.close()
    return before, behind
