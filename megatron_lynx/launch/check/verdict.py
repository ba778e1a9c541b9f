"""What is said where a step differs, or cannot be compared."""

from __future__ import annotations

import os

from megatron_lynx.errors import LynxError, Problem
from megatron_lynx.launch.check.outcome import Difference
from megatron_lynx.launch.check.reference import IN_WORDS, Kind


def plan_differs(step: int, kind: Kind, first: Difference, count: int) -> LynxError:
    places = "one place" if count == 1 else f"{count} places, the first of them here"
    todo = "train without this plan, and report it with the plan and this launch's arguments"
    problem = Problem(first.place, first.found, "the same bits", todo)
    return LynxError(f"--lynx-check: in step {step} the plan and {IN_WORDS[kind]} differ in {places}", [problem])


DETERMINISTIC = {"NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
"""What `--deterministic-mode` of Megatron 0.19 sets in the environment; before 0.19 it leaves that to the user."""


def not_repeatable(step: int, kind: Kind, first: Difference) -> LynxError:
    wanted = ", ".join(f"{name}={value} (here {os.environ.get(name, 'not set')})" for name, value in DETERMINISTIC.items())
    todo = f"launch with --deterministic-mode, without flash attention and --cross-entropy-loss-fusion, and set {wanted}"
    problem = Problem(first.place, first.found, "the same bits: nothing can be compared with what differs from itself", todo)
    return LynxError(f"--lynx-check: in step {step} {IN_WORDS[kind]} differs from itself when it runs twice", [problem])


def out_of_memory(step: int, kind: Kind, error: BaseException) -> LynxError:
    """Other ranks may wait for this one in a collective, so there is no going on."""
    first = str(error).splitlines()[0] if str(error) else "out of memory"
    todo = {
        "none": "give --lynx-check-against full: its bits are the same",
        "full": "check with fewer layers or shorter sequences",
    }
    problem = Problem("--lynx-check", f"{IN_WORDS[kind]} ran out of device memory in step {step} ({first})", "", todo[kind])
    return LynxError("the plan cannot be checked like this", [problem])
