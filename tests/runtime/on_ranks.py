"""What runs on a rank, where the stand-in answers for CUDA: its streams do everything at once, so this shows calls, not order."""

from __future__ import annotations

import weakref

import torch

HERE = torch.device("cpu")


def there_and_back_on_streams(rank: int) -> dict[str, bool]:
    from megatron_lynx.runtime.cuda import CudaDevice
    from megatron_lynx.runtime.offload.copier import Owner, copiers_for
    from megatron_lynx.runtime.trace import Trace

    device, owner = CudaDevice(HERE), Owner("stage 0", 0)
    out, back = copiers_for(device, Trace(device))
    source = torch.arange(100, dtype=torch.uint8)
    host, returned, held = torch.zeros_like(source), torch.zeros_like(source), weakref.ref(source)
    leaving = out.start([(host, source)], owner)
    del source
    coming = back.start([(returned, host)], owner, after=(leaving, None))
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

    from megatron_lynx.runtime.cuda import CudaDevice
    from megatron_lynx.runtime.device import device_for
    from megatron_lynx.runtime.offload import HostLimit, Offloader, OffloadPolicy
    from megatron_lynx.runtime.offload.copier import copiers_for

    made = Offloader({0: OffloadPolicy(10**4, 1, 1, 1)}, device=device_for(HERE), limit=HostLimit(10**6))
    made.out, made.back = copiers_for(CudaDevice(HERE), made.trace)
    bytes_of_it = np.arange(100, dtype=np.uint8)
    held = weakref.ref(bytes_of_it)
    group = made.open(0, 0)
    handle = group.push(torch.from_numpy(bytes_of_it))
    del bytes_of_it
    made.depart(group, None)
    del handle
    before = held() is not None
    made.settle()
    behind = held() is not None
    made.close()
    return before, behind


def a_copy_that_fails_on_streams(rank: int) -> dict[str, bool]:
    """A failure is known when the copy is asked for, and told where it is waited for all the same."""
    from megatron_lynx.errors import OffloadError
    from megatron_lynx.runtime.cuda import CudaDevice
    from megatron_lynx.runtime.offload.copier import Owner, copiers_for
    from megatron_lynx.runtime.trace import Trace

    class Held:
        """Something of the step that the asking function holds."""

    device, held = CudaDevice(HERE), []
    out, back = copiers_for(device, Trace(device))
    host, here = (torch.zeros(100, dtype=torch.uint8) for _ in range(2))

    def asked():  # type: ignore[no-untyped-def]
        mine = Held()
        held.append(weakref.ref(mine))
        leaving = out.start([(host, here)], Owner("stage 0", 7))
        return leaving, back.start([(here, host)], Owner("stage 0", 8), after=(leaving,))

    def breaking(target: torch.Tensor, source: torch.Tensor) -> None:
        raise MemoryError("no pages left")

    out.move = breaking
    copies, told = asked(), []
    for copier, copy in zip((out, back), copies, strict=True):
        try:
            copier.wait(copy)
        except OffloadError as error:
            told.append(str(error))
    return {
        "told twice": len(told) == 2,
        "the one that broke": all("stage 0, micro-batch 7" in text and "no pages left" in text for text in told),
        "done": all(copy.done for copy in copies),
        "the step is not held": held[0]() is None,
    }
