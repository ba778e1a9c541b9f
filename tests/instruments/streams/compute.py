"""Tells what every operation of torch on the calling thread reads and writes: below autograd, so that backward is seen, too."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lynx.nest import all_in
from tests.instruments.streams.happens_before import HappensBefore

TOUCH_NOTHING = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "set_", "resize_", "record_stream")
"""Operations that make or move tensors, and look at no byte of them; as views do."""

ELSEWHERE = ("c10d", "_c10d_functional", "prim", "profiler")
"""Namespaces of operations that are told otherwise, or are none."""


class Computing(TorchDispatchMode):
    """Tells `account` of all that is computed inside, on this thread."""

    def __init__(self, account: HappensBefore) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._account = account

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__.partition(".")[0]
        if func.is_view or func.namespace in ELSEWHERE or name in TOUCH_NOTHING:
            return func(*args, **kwargs)
        reads, writes = _used_by(func, args, kwargs)
        result = func(*args, **kwargs)
        writes += all_in(Tensor, result)
        self._account.computes(name, reads, writes)
        if name in ("_local_scalar_dense", "nonzero"):
            self._account.host_reads()
        return result


def _used_by(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Its tensors, and those of them that it changes."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        changed = argument.alias_info is not None and argument.alias_info.is_write
        (writes if changed else reads).extend(all_in(Tensor, value))
    return reads, writes
