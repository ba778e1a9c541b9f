"""Faults put in on purpose, each a context on one rank: what an instrument that is worth anything finds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tests.instruments.replacing import replace


def replace_function(undo: ExitStack, owner: Any, name: str, wrong: Callable[..., Any]) -> None:
    """Replaces a function. Raises `TypeError` where `wrong` cannot be called as the function can: such a fault shows nothing."""
    parameters = inspect.signature(getattr(owner, name)).parameters.values()
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    named = {each.name: None for each in parameters if each.kind is each.KEYWORD_ONLY}
    for given in (positional, [each for each in positional if each.default is each.empty]):
        inspect.signature(wrong).bind(*given, **named)
    replace(undo, owner, name, wrong)


@contextmanager
def a_copy_out_that_does_not_wait() -> Iterator[None]:
    """It starts before what it reads was computed, and before its host memory was read for the last time."""
    with _stream_that_waits_for_nothing("offload"):
        yield


@contextmanager
def a_reload_that_does_not_wait() -> Iterator[None]:
    """It starts before its own way out is over."""
    with _stream_that_waits_for_nothing("reload"):
        yield


@contextmanager
def a_backward_that_does_not_wait() -> Iterator[None]:
    """Compute reads what is still on its way back."""
    with _stream_that_waits_for_nothing("compute"):
        yield


@contextmanager
def an_original_released_early() -> Iterator[None]:
    """The device's memory is let go as soon as its copy to the host was asked for."""
    from megatron_lynx.runtime.offload import OffloadGroup

    send = OffloadGroup.send

    def sending(group: Any) -> None:
        before = len(group._leaving)
        send(group)
        for leaving, _ in list(group._leaving)[before:]:
            for storage in leaving.alive():
                storage._let_go()

    with ExitStack() as undo:
        replace_function(undo, OffloadGroup, "send", sending)
        yield


@contextmanager
def an_address_taken_for_its_tensor() -> Iterator[None]:
    """What was let go in the middle of a forward is still known by its address, which another tensor has by now."""
    from megatron_lynx.runtime.offload import OffloadedStorage

    with ExitStack() as undo:
        replace(undo, OffloadedStorage, "here", True)
        yield


@contextmanager
def a_copy_back_into_memory_let_go() -> Iterator[None]:
    """The memory that a reload fills is not held meanwhile: by nobody but a second, which waits for nothing."""
    from megatron_lynx.runtime.device import Copier

    start = Copier.start

    def starting(copier: Any, pairs: Any, *args: Any) -> Any:
        if copier.direction == "reload":
            start(copier, [(target.new_empty(target.shape), source) for target, source in pairs], *args).release()
        return start(copier, pairs, *args)

    with ExitStack() as undo:
        replace_function(undo, Copier, "start", starting)
        yield


@contextmanager
def host_memory_lent_too_early() -> Iterator[None]:
    """A copy out does not come behind the copy back that still reads its room."""
    from megatron_lynx.runtime.host_memory import HostMemory

    lend = HostMemory.lend

    def lending(memory: Any, key: Any, sizes: Any) -> Any:
        lease = lend(memory, key, sizes)
        lease.room.last = None
        return lease

    with ExitStack() as undo:
        replace_function(undo, HostMemory, "lend", lending)
        yield


@contextmanager
def a_gather_buffer_reused() -> Iterator[None]:
    """All halves gather their inputs into one buffer, as Megatron does, though one is read while the next is gathered."""
    import torch

    from megatron_lynx.apply.hooks import collectives

    buffers: dict[Any, Any] = {}

    def start_gather(group: Any) -> Any:
        def gather(tensor: Any) -> Any:
            source = tensor.contiguous()
            shape = (source.size(0) * group.size(), *source.shape[1:])
            buffer = buffers.setdefault(shape, source.new_empty(shape))
            return buffer, torch.distributed.all_gather_into_tensor(buffer, source, group=group, async_op=True)

        return gather

    with ExitStack() as undo:
        replace_function(undo, collectives, "start_gather", start_gather)
        yield


@contextmanager
def a_collective_that_is_not_waited_for() -> Iterator[None]:
    """What runs in its window runs, and then what it brings is used."""
    with _windows(lambda window, proper: window(lambda: True)):
        yield


@contextmanager
def a_window_behind_its_wait() -> Iterator[None]:
    """What runs in a window runs when there is nothing left to hide."""

    def behind(window: Callable[[Any], Any], proper: Callable[[], Any]) -> Any:
        waited = proper()
        return window(lambda: waited)

    with _windows(behind):
        yield


@contextmanager
def _windows(opened: Callable[[Callable[[Any], Any], Callable[[], Any]], Any]) -> Iterator[None]:
    """`opened`: what happens in place of opening a window around the wait proper."""
    from megatron_lynx.runtime.engine import WindowedWork

    init = WindowedWork.__init__

    def made(windowed: WindowedWork, work: Any, window: Any) -> None:
        init(windowed, work, lambda proper: opened(window, proper))

    with ExitStack() as undo:
        replace_function(undo, WindowedWork, "__init__", made)
        yield


@contextmanager
def _stream_that_waits_for_nothing(name: str) -> Iterator[None]:
    from tests.instruments.streams.asynchronous import AsynchronousStream

    wait = AsynchronousStream.wait

    def waiting(stream: Any, event: Any) -> None:
        if stream.name != name:
            wait(stream, event)

    with ExitStack() as undo:
        replace_function(undo, AsynchronousStream, "wait", waiting)
        yield
