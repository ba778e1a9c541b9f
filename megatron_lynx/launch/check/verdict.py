"""The errors of a checked step: it differs from stock, stock from itself, a replay from its forward; or memory ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_lynx.errors import LynxError, Problem
from megatron_lynx.launch.check.outcome import Difference
from megatron_lynx.launch.check.reference import IN_WORDS, ReferenceSetting

IN_PIECES = "its head is in pieces, whose GEMMs have fewer rows, and a device may compute these otherwise"
"""Why a plan that is right may differ from stock on a GPU, where a kernel is chosen by the shape of a GEMM."""


def plan_differs(
    step: int, setting: ReferenceSetting, first: Difference, count: int, *, head_in_pieces: bool = False
) -> LynxError:
    places = "one place" if count == 1 else f"{count} places, the first of them here"
    todo = "train without this plan, and report it with the plan and this launch's arguments"
    if head_in_pieces:
        todo = f"{IN_PIECES}: check --lynx-check frames, or a plan whose head is whole; else {todo}"
    problem = Problem(first.place, first.found, "the same bits", todo)
    return LynxError(f"--lynx-check: in step {step} the plan and {IN_WORDS[setting]} differ in {places}", [problem])


def frames_differ(first: Difference, count: int, compared: int) -> LynxError:
    """`count` of `compared` tensors of drawn frames are not what their forward had saved."""
    todo = "train without this plan, and report it with the plan and this launch's arguments"
    problem = Problem(first.place, first.found, "the same bits", todo)
    headline = f"--lynx-check frames: {count} of {compared} tensors of backward are not what forward saved; the first of them"
    return LynxError(headline, [problem])


DETERMINISTIC = {"NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
"""What `--deterministic-mode` of Megatron 0.19 sets in the environment; before 0.19 it leaves that to the user."""


def not_repeatable(step: int, setting: ReferenceSetting, first: Difference) -> LynxError:
    wanted = ", ".join(f"{name}={value} (here {os.environ.get(name, 'not set')})" for name, value in DETERMINISTIC.items())
    todo = f"launch with --deterministic-mode, without flash attention and --cross-entropy-loss-fusion, and set {wanted}"
    problem = Problem(first.place, first.found, "the same bits: nothing can be compared with what differs from itself", todo)
    return LynxError(f"--lynx-check: in step {step} {IN_WORDS[setting]} differs from itself when it runs twice", [problem])


class OutOfMemory(LynxError):
    """A pass did not fit on this rank's device."""


INSTEAD = {
    IN_WORDS["none"]: "give --lynx-check-against full: its bits are the same",
    IN_WORDS["full"]: "check with fewer layers or shorter sequences",
}
WITHOUT_CHECK = "launch without --lynx-check; where that runs out of memory, too, make a plan for less memory"


@contextmanager
def enough_memory(step: int, what: str) -> Iterator[None]:
    """Raises `OutOfMemory` where what runs inside (`what` in words) meets the end of device memory."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        found = f"{what} ran out of device memory in step {step} ({_how_much(error)})"
        problem = Problem("--lynx-check", found, "", INSTEAD.get(what, WITHOUT_CHECK))
        raise OutOfMemory("the plan cannot be checked like this", [problem]) from None


def _how_much(error: BaseException) -> str:
    """The allocator's own figures: what was asked for, what the device has, what is free."""
    first = str(error).partition("\n")[0].partition(" Including ")[0]
    return first.removeprefix("CUDA out of memory. ").rstrip(".") or "no figures"
