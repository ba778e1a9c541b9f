"""One call of a half's code: sites and collectives that it reaches report to it.

Run          nothing is let go: only its collectives are counted
Recorder     saved tensors become handles (`runtime.record`)
Replayer     what was let go is computed again (`runtime.replay`)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_lynx.runtime.frame import Frame
from megatron_lynx.runtime.site import Site, SiteCall


class Run:
    """A call in which nothing is let go, and the base of the others."""

    replays = False
    owns_gathered = False
    """Whether what the present site gathers is kept, and so must lie in a buffer of its own."""
    gathering: tuple[Any, Any] | None = None
    """What a gather of the present site's input would make, and the `Work` that makes it, if it was started already."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.collectives = 0
        """How many it has issued that are windows."""
        self._segment = 0
        self._ordinal = 0
        self._item: str | None = None

    def run(self, *given: Any) -> Any:
        """Runs the half's code on these arguments and keyword arguments."""
        args, kwargs = given
        return self.frame.code(*args, **kwargs)

    def passes(self, site: Site) -> bool:
        """Whether a site is called as without a plan."""
        return True

    def site(self, call: SiteCall) -> Any:
        """The half's code calls a site that is not passed."""
        return call()

    def window(self, *, exchange: bool) -> Callable[[Any], Any] | None:
        """Of a replay: what it makes of the `Work` of a collective that it issues; None: that may be issued as it comes."""
        return None

    def keep_gathered(self, whole: Any) -> None:
        """The present site has gathered its input: a tensor, or what stands for one in FP8."""

    def experts_got(self, rows: int, balanced: int) -> None:
        """Experts are called with so many rows. `balanced`: how many they would get if all were asked as often."""

    def _enter(self, item: str | None = None) -> None:
        """The next segment begins."""
        self._segment += 1
        self._ordinal = 0
        self._item = item


class Done:
    """The `Work` of what was waited for already, or of what is left in flight: another waits for it."""

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        return True


DONE = Done()
