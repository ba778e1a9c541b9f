"""The schedules that a search can be asked about, by the names that people use.

flush              1F1B: one chunk on each stage, the pipeline is emptied before every update
interleaved        the same with several chunks
double-buffered    never emptied: two versions of the weights, gradients that are one update old. Only if asked for
"""

from __future__ import annotations

from typing import Literal, get_args

from megatron_lynx.config.job import Job

Name = Literal["flush", "interleaved", "double-buffered"]
NAMES: tuple[Name, ...] = get_args(Name)
EXACT: tuple[Name, ...] = ("flush", "interleaved")
"""Those that change nothing about what is learnt."""

GRADIENT_AGE_UPDATES: dict[Name, int] = {"flush": 0, "interleaved": 0, "double-buffered": 1}
OLD_GRADIENTS = "double-buffered: every gradient is one update old, which changes what is learnt from step to step"


def schedule_of(job: Job) -> Name:
    if job.schedule == "double_buffered":
        return "double-buffered"
    return "flush" if job.chunks == 1 else "interleaved"
