"""What our own flags in a launch say about its job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_lynx.errors import Problem
from megatron_lynx.launch_arguments.fact import Fact
from megatron_lynx.launch_arguments.given import Given

SCHEDULE = "--lynx-schedule"
SCHEDULES = {"flush": "flush", "double-buffered": "double_buffered"}
"""As the flag names them, and as a job does."""

WITHOUT_FLUSHES = {
    "rampup_batch_size": "every batch must have as many micro-batches",
    "step_batch_size_schedule": "every batch must have as many micro-batches",
    "perform_rl_step": "rollouts need weights that are one version, in every step",
    "overlap_param_gather": "weights would arrive during the forward of another version",
    "calculate_per_token_loss": "it was not tried",
    "use_precision_aware_optimizer": "it was not tried",
    "optimizer_cpu_offload": "it was not tried",
    "nccl_ub": "its weights live in memory registered with NCCL",
}
"""Megatron's arguments that a launch without flushes refuses, and why; those that no plan goes with are not repeated here."""


def schedule_facts(arguments: Sequence[str], problems: list[Problem]) -> Iterator[Fact]:
    """Nothing where the launch does not say: it flushes. The last word counts."""
    if not (said := list(_values(arguments, SCHEDULE))):
        return
    if said[-1] in SCHEDULES:
        yield Fact("schedule", SCHEDULES[said[-1]], SCHEDULE)
    else:
        problems.append(Problem(SCHEDULE, said[-1] or "nothing", f"one of {', '.join(SCHEDULES)}"))


def refused_without_flushes(given: Given) -> Iterator[Problem]:
    """What of a launch does not go together with two versions of the weights."""
    for name, why in WITHOUT_FLUSHES.items():
        if name in given.values and given[name]:
            yield Problem(given.origin(name), "given", f"a launch without it, or without {SCHEDULE} double-buffered", why)
    mode = given["rerun_mode"]
    if "rerun_mode" in given.values and mode != "disabled":
        needed = f"disabled with {SCHEDULE} double-buffered"
        yield Problem(given.origin("rerun_mode"), str(mode), needed, "batches overlap: none can be run again alone")


def _values(arguments: Sequence[str], flag: str) -> Iterator[str]:
    """Every value that is given to a flag, empty where none is."""
    for word, following in zip(arguments, (*arguments[1:], ""), strict=True):
        name, equals, value = word.partition("=")
        if name == flag:
            yield value if equals else "" if following.startswith("--") else following
