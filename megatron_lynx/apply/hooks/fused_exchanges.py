"""The windows of experts whose tokens travel by DeepEP's kernels.

Replaces              `dispatch` and `combine` of `deep_ep.Buffer`, which Megatron's flex dispatcher calls in both passes.
Why                   they travel on a stream of the buffer's own, and compute waits for the event that they return.
Calls the original    once per call, with the arguments as they came.
Holds                 nothing.
Passes through when   nothing runs in the window, the caller did not ask for an event (it has waited inside), or the call is made
                      outside a half of experts and its backward. Installed only where the plan names such windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from megatron_lynx.apply.hook import Claim
from megatron_lynx.runtime.engine import Engine

ASYNC = "async_finish"
"""The argument with which a caller asks for an event, and waits for it where it needs what travelled."""


class _Event:
    """As a `Work`: what a window waits for."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> Any:
        return self._event.current_stream_wait()


class WindowedEvent:
    """An event of a buffer's stream whose wait is a window. Everything else is the event's own."""

    def __init__(self, event: Any, window: Callable[[Any], Any]) -> None:
        self._event = event
        self._work = window(_Event(event))

    def current_stream_wait(self) -> Any:
        return self._work.wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._event, name)


def claims(engine: Engine) -> Iterator[Claim]:
    from megatron.core.transformer.moe import fused_a2a

    def in_window(original: Any) -> Any:
        @wraps(original)
        def exchange(*args: Any, **kwargs: Any) -> Any:
            window = engine.waits.window(exchange=True) if kwargs.get(ASYNC) and engine.in_half else None
            found = original(*args, **kwargs)
            return found if window is None else (*found[:-1], WindowedEvent(found[-1], window))

        return exchange

    for method in ("dispatch", "combine"):
        yield Claim(fused_a2a.Buffer, method, in_window, "brings tokens to experts, and back")
