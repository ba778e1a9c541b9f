"""The time of many micro-batches from the times of few.

micro-batches   0 ... 2p + rest ... 3p + rest ........................ m      from 2p on every further p of them take as
                simulated          │ simulated │ as often as needed           long as the p before: the pipeline is full
"""

from __future__ import annotations

from collections.abc import Callable


def in_steady_state(step_s: Callable[[int], float], microbatches: int, pipeline: int) -> float:
    """`step_s(microbatches)`, without asking for more than four times as many micro-batches as stages."""
    if microbatches <= 4 * pipeline:
        return step_s(microbatches)
    whole, rest = divmod(microbatches, pipeline)
    short_s, longer_s = step_s(2 * pipeline + rest), step_s(3 * pipeline + rest)
    return short_s + (whole - 2) * (longer_s - short_s)
