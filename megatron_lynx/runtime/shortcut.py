"""A replay without the half's code: its first sites, one after another.

    half(hidden, ...) ──> norm(hidden) ──> linear_qkv(normed) ──> ...       let go: what the norm saved, and linear_qkv's input
                            └ step 0: handed what the half was                └ step 1: handed what step 0 returned

The code between a half's sites is Python that runs again in every replay, up to the last site of which anything was let go. Where
nothing in between was let go, and each of these sites is handed one of the half's own arguments or what one before it returned,
as it is, they can be called without that code. A half's first call learns whether that is so; each later one looks again, by the
identity of tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from megatron_lynx.nest import first_in
from megatron_lynx.runtime.site_call import Site, SiteCall


class Step(NamedTuple):
    """One site of a shortcut."""

    site: Site
    segment: int
    source: int
    """Which of the values at hand when it is called it is handed: first the half's arguments, then what each step returned."""


class Course:
    """Follows the first sites of one call of a half, for as long as steps can lead there."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any], most: int | None = None) -> None:
        """`most`: how many steps are wanted, where that is known."""
        self._values = [*args, *kwargs.values()]
        self._steps: list[Step] = []
        self._left = most

    def called(self, call: SiteCall, segment: int) -> None:
        """A site is called."""
        if self._left == 0:
            return
        given = call.args[0] if len(call.args) == 1 and not call.kwargs else None
        for source, value in enumerate(self._values):
            if value is given and given is not None:
                self._steps.append(Step(call.site, segment, source))
                self._left = None if self._left is None else self._left - 1
                break
        else:
            self._left = 0
        if self._left == 0:
            self._values.clear()  # nobody is kept longer for it

    def returned(self, outputs: Any) -> None:
        """What that site returned."""
        if self._left != 0:
            self._values.append(first_in(Tensor, outputs))

    def steps(self, lets_go: Collection[int]) -> tuple[Step, ...]:
        """Those that lead to all segments in which anything was let go; none where that takes the half's code."""
        wanted, found = set(lets_go), []
        for step in self._steps:
            if not wanted:
                break
            found.append(step)
            wanted.difference_update(range(step.segment - step.site.segments + 1, step.segment + 1))
        return () if wanted else tuple(found)
