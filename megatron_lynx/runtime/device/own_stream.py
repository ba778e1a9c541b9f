"""A CUDA stream that is nobody else's.

    a stream of torch's    one of 32 of a pool, in turns: the 33rd that anybody asks for is the first again
    NCCL's groups          take theirs from the same pool, one for each communicator
    a copy on an alias     stands behind a receive that nobody has answered yet, and with it what waits for the copy

So the driver is asked for one, on the device's primary context, which is torch's. Not CUDA's runtime: a torch may have it linked
in, where nobody else finds it, and torch's binding (`cudart().cudaStreamCreate`) makes streams that wait for the default stream,
where torch computes. A stream lives as long as the process: torch's allocator and events may refer to it at any time.
"""

from __future__ import annotations

import ctypes
from typing import Any

DRIVER = "libcuda.so.1"
NON_BLOCKING = 1
"""`CU_STREAM_NON_BLOCKING`: it does not wait for the default stream, nor that one for it."""


def new_stream(device: int, driver: Any = None) -> int:
    """The handle of a new stream of a device, by CUDA's number. `driver`: its library, for tests.

    Raises `OSError` where there is no driver, and `RuntimeError` with CUDA's status where it makes none.
    """
    library = driver or ctypes.CDLL(DRIVER)
    context, stream = ctypes.c_void_p(), ctypes.c_void_p()
    _call(library, "cuInit", 0)
    _call(library, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    _call(library, "cuCtxPushCurrent_v2", context)
    try:
        _call(library, "cuStreamCreate", ctypes.byref(stream), NON_BLOCKING)
    finally:
        _call(library, "cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
    assert stream.value, "a status of success, and no stream"
    return stream.value


def _call(library: Any, name: str, *arguments: Any) -> None:
    if (status := getattr(library, name)(*arguments)) != 0:
        raise RuntimeError(f"{name} returned {status}")
