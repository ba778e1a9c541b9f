"""What our own flags in a launch say about its job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_lynx.errors import Problem
from megatron_lynx.launch_arguments.fact import Fact

SCHEDULE = "--lynx-schedule"
SCHEDULES = {"flush": "flush", "double-buffered": "double_buffered"}
"""As the flag names them, and as a job does."""


def schedule_facts(arguments: Sequence[str], problems: list[Problem]) -> Iterator[Fact]:
    """Nothing where the launch does not say: it flushes. The last word counts."""
    if not (said := list(_values(arguments, SCHEDULE))):
        return
    if said[-1] in SCHEDULES:
        yield Fact("schedule", SCHEDULES[said[-1]], SCHEDULE)
    else:
        problems.append(Problem(SCHEDULE, said[-1] or "nothing", f"one of {', '.join(SCHEDULES)}"))


def _values(arguments: Sequence[str], flag: str) -> Iterator[str]:
    """Every value that is given to a flag, empty where none is."""
    for word, following in zip(arguments, (*arguments[1:], ""), strict=True):
        name, equals, value = word.partition("=")
        if name == flag:
            yield value if equals else "" if following.startswith("--") else following
