"""Reads our own flags in a launch: what they say about its job, and what the launcher would refuse."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from megatron_lynx.errors import Problem
from megatron_lynx.launch_arguments.command_line import OURS
from megatron_lynx.launch_arguments.given import Fact

SCHEDULE = "--lynx-schedule"
SCHEDULES = {"flush": "flush", "double-buffered": "double_buffered"}
"""Schedules by their name as a value of the flag, and their name in a job."""

_NAMES = ("host", "plan", "trace", "trace-step", "outcome", "check", "check-against", "schedule", "log")
FLAGS = tuple(f"{OURS}{name}" for name in _NAMES)
"""The launcher's flags, which a launch may already have before it is planned."""

COUNTS = {
    "--lynx-check": ("how many steps, from 1, or frames, or frames:N", re.compile(r"frames|(frames:)?0*[1-9][0-9]*")),
    "--lynx-trace-step": ("a whole number from 1", re.compile(r"0*[1-9][0-9]*")),
}
"""Flags that are followed by a number, what they need in words, and how that is written."""


def misread(arguments: Sequence[str]) -> Iterator[Problem]:
    """What the launcher would refuse of our flags, whatever the plan is."""
    for flag in dict.fromkeys(word.partition("=")[0] for word in arguments if word.startswith(OURS)):
        if flag not in FLAGS:
            near = difflib.get_close_matches(flag, FLAGS, n=1)
            yield Problem(flag, "unknown", f"one of {', '.join(FLAGS)}", f"did you mean {near[0]}?" if near else "")
    for flag, (needed, pattern) in COUNTS.items():
        for value in _values(arguments, flag):
            if not pattern.fullmatch(value):
                yield Problem(flag, value or "nothing", needed)


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
    for word, following in pairwise((*arguments, "")):
        name, equals, value = word.partition("=")
        if name == flag:
            yield value if equals else "" if following.startswith("--") else following
