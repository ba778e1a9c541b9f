"""Seconds of a step under several settings, which take turns, so that a machine that slows down slows them all.

warm-up   A B C   A B C                not kept
round 0   |A |B |C                     | prepare; barrier of all ranks and, on CUDA, an idle device: not timed
round 1   |A |B |C
          └┴─ one sample: from the barrier until this rank's step is done (on CUDA: done on the device)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

import torch

Step = Callable[[], object]


@dataclass(frozen=True)
class Summary:
    """Median and quartiles of samples, in seconds. A single sample is its own quartiles."""

    median_s: float
    lower_s: float
    upper_s: float


def summarise(samples_s: Sequence[float]) -> Summary:
    """Their median and quartiles. Raises ValueError where there are no samples."""
    if not samples_s:
        raise ValueError("no samples to summarise")
    if len(samples_s) == 1:
        return Summary(samples_s[0], samples_s[0], samples_s[0])
    lower, _, upper = quantiles(samples_s, n=4, method="inclusive")
    return Summary(median(samples_s), lower, upper)


def time_alternating(
    steps: Mapping[str, Step],
    *,
    rounds: int,
    warmups: int = 1,
    prepare: Callable[[str], object] = lambda setting: None,
    barrier: Step = lambda: None,
    device: torch.device | str = "cpu",
) -> dict[str, tuple[float, ...]]:
    """This rank's samples in seconds, by setting, one per round.

    `prepare` is called with a setting's name before each of its turns, outside of what is timed: to put it in force.
    Every rank must call this with the same settings in the same order, or their collectives do not meet.
    """
    samples: dict[str, list[float]] = {setting: [] for setting in steps}
    for number in range(warmups + rounds):
        for setting, step in steps.items():
            prepare(setting)
            seconds = _one(step, barrier, torch.device(device))
            if number >= warmups:
                samples[setting].append(seconds)
    return {setting: tuple(taken) for setting, taken in samples.items()}


def _one(step: Step, barrier: Step, device: torch.device) -> float:
    _wait_for(device)
    barrier()
    start = time.perf_counter()
    step()
    _wait_for(device)
    return time.perf_counter() - start


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
