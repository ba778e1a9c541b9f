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
