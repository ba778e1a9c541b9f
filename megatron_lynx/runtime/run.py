"""One call of a half's code, to which sites and collectives report.

Run          keeps all saved tensors, and counts collectives
Recorder     replaces saved tensors by handles (`runtime.record`)
Replayer     recomputes dropped tensors (`runtime.replay`)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_lynx.runtime.frame import Frame
from megatron_lynx.runtime.site import Site, SiteCall


class Run:
    """A call that keeps everything; base of recorder and replayer."""

    replays = False
    owns_gathered = False
    """Whether the site's gathered input is kept, and so needs a buffer that is not shared."""
    gathering: tuple[Any, Any] | None = None
    """(gathered input of the present site, the `Work` that fills it), if it was started before."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.collectives = 0
        """Windows among the collectives issued so far."""
        self._segment = 0
        self._ordinal = 0
        self._item: str | None = None

    def run(self, *given: Any) -> Any:
        args, kwargs = given
        return self.frame.code(*args, **kwargs)

    def passes(self, site: Site) -> bool:
        """Return whether a site is called as without a plan."""
        return True

    def site(self, call: SiteCall) -> Any:
        return call()

    def window(self, *, exchange: bool) -> Callable[[Any], Any] | None:
        """Return what wraps the `Work` of a collective that a recomputation issues; None leaves the `Work` as it is."""
        return None

    def keep_gathered(self, whole: Any) -> None:
        """Report the gathered input of the present site: a tensor, or TE's quantized storage of one."""

    def experts_got(self, rows: int, balanced: int) -> None:
        """Report the rows that experts are called with. `balanced`: rows under uniform routing."""

    def _enter(self, item: str | None = None) -> None:
        """Begin the next segment."""
        self._segment += 1
        self._ordinal = 0
        self._item = item


class Done:
    """The `Work` of a collective that was waited for before, or that is left in flight for another waiter."""

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        return True


DONE = Done()
