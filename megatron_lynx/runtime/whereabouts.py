"""Where in a step an engine was when something failed inside it: kept with the error, because the engine forgets a failed step.

    passes  ── a half, or a replay ── error
                    │                   │ [1] the innermost call notes where it is, on the error
                    └ scope is left     │ [2] further out nothing is noted again
    the step is abandoned               └──> who explains the error asks for it

Nothing of this costs a step that does not fail.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_lynx.anatomy.address import FrameKey

_NAME = "_megatron_lynx_whereabouts"


@dataclass(frozen=True)
class Whereabouts:
    """A moment of one rank's step, as its engine saw it."""

    passing: Literal["forward", "backward"]
    micro_batch: int | None = None
    """Counted from 0 in the step. None: it was not recorded."""
    chunk: int = 0
    half: FrameKey | None = None
    """The half that ran, or that backward had reached; of a replay, the half that was made again."""
    replays: bool = False
    expert_load: float = 0.0
    """Of this step so far, as counted (`counts`)."""


def note(error: BaseException, where: Whereabouts) -> None:
    """Remember where an error came up, unless somebody further in has."""
    if whereabouts_of(error) is None:
        setattr(error, _NAME, where)


def whereabouts_of(error: BaseException) -> Whereabouts | None:
    """Where it came up; None for errors that did not come out of a pass."""
    found = getattr(error, _NAME, None)
    return found if isinstance(found, Whereabouts) else None
