"""Two ranks that run at the same time on one GPU, under MPS: real kernels beside real collectives.

[1] stock none, stock full, ours on demand and ours in windows, from the same weights and seed: every loss and gradient equal
[2] the four take turns: seconds of a step
[3] one step more of ours, on demand and in windows, profiled: beside which of NCCL's kernels did recomputation run?

Elsewhere in this run ranks that share a GPU take turns by context, so nothing of one rank runs beside another one's. Here they do
not. Each rank has less than half of the GPU, and sockets join them: seconds are given as ratios between these four settings.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from megatron_lynx.config.job import Job
from megatron_lynx.measure.memory import nothing_reported
from megatron_lynx.plan.plan import Plan
from scripts.gpu_check.beside import ANNOTATION, Beside, beside
from scripts.gpu_check.part import Answer
from scripts.gpu_check.trial import repeatable


@dataclass(frozen=True)
class SideBySide:
    """What is trained."""

    job: Job
    plan: Plan
    rounds: int
    """Timed steps of each setting."""


def side_by_side(rank: int, setting: SideBySide) -> Answer:
    """Runs inside `RankPool`."""
    from megatron_lynx.testbed.candidates import FULL, NONE, ours
    from megatron_lynx.testbed.comparison import laps_of, subjects_of

    subjects = subjects_of(setting.job, [NONE, FULL, *ours(setting.plan)])
    with repeatable():
        wrong, notes = differing(subjects)
    with repeatable(timed=True):
        laps = laps_of(subjects, setting.rounds, warmups=1)
        profiled = {name: _profiled(subject) for name, subject in subjects.items() if subject.candidate.ours}
    step_s = {name: median(lap.step_s) for name, lap in laps.items()}
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        wrong += unseen(profiled)
    return Answer(
        wrong=tuple(wrong),
        notes=(*notes, *(in_words(step_s, profiled) if on_gpu else ["without a GPU: bits only"])) if rank == 0 else (),
        figures={
            "step, s": {name: lap.step_s for name, lap in laps.items()},
            "NCCL kernels": {name: len(found.collectives) for name, found in profiled.items()},
            "NCCL kernels beside recomputation": {name: found.accompanied for name, found in profiled.items()},
            "seconds of recomputation beside NCCL kernels, share": {name: found.hidden_share for name, found in profiled.items()},
        },
    )


def differing(subjects: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Name settings whose losses or gradients are not the first one's in every bit.

    Return what is wrong, and notes: only notes where the first setting does not repeat its own bits.
    """
    first, *others = subjects.values()
    reference = _second_step(first)
    restless = _first_difference(reference, first.repeatable_step())
    found = [
        f"{other.candidate.name}: {difference}"
        for other in others
        if (difference := _first_difference(reference, _second_step(other))) is not None
    ]
    if restless is None:
        return found, []
    return [], [f"bits are not judged: {first.candidate.name} differs from itself: {restless}", *found]


def _second_step(subject: Any) -> dict[str, torch.Tensor]:
    """Return losses and gradients of a setting's second step: kernels may be chosen in the first."""
    with subject.in_force():
        subject.repeatable_step()
        return subject.repeatable_step()  # type: ignore[no-any-return]


def _first_difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> str | None:
    """Return how many of the tensors differ, and where the first does. None if all bits are equal."""
    names = [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]
    if not names:
        return None
    here, there = one[names[0]].double(), other[names[0]].double()
    parts, most = int((here != there).sum()), float((here - there).abs().max())
    said = f"{parts} of {here.numel()} elements, by {most:.3g} at most (the largest is {float(here.abs().max()):.3g})"
    return f"{len(names)} of {len(one)} losses and gradients are not equal in every bit, first {names[0]}: {said}"


def _profiled(subject: Any) -> Beside:
    """One step under a plan."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with subject.in_force(), _annotated(), tempfile.TemporaryDirectory() as folder:
        torch.cuda.synchronize()
        with nothing_reported(), profile(activities=activities) as profiler:
            subject.step()
            torch.cuda.synchronize()
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return beside(json.loads(path.read_text()))


@contextmanager
def _annotated() -> Iterator[None]:
    """Recomputations say that they are, to the profiler."""
    from megatron_lynx.runtime.recompute import Recomputations

    original: Callable[..., None] = Recomputations.recompute

    @wraps(original)
    def recompute(*args: Any, **kwargs: Any) -> None:
        with torch.profiler.record_function(ANNOTATION):
            original(*args, **kwargs)

    with patch.object(Recomputations, "recompute", recompute):
        yield


def unseen(profiled: Mapping[str, Beside]) -> Iterator[str]:
    """What profiles on a GPU must show, and these do not."""
    missing = False
    for name, found in profiled.items():
        for what, kernels in {"of NCCL": found.collectives, "that recomputes": found.recomputations}.items():
            if not kernels:
                missing = True
                yield f"{name}: the profile has no kernel {what}"
    if not missing and not profiled["ours"].accompanied:
        yield "ours: recomputation ran beside none of NCCL's kernels"


def in_words(step_s: Mapping[str, float], profiled: Mapping[str, Beside]) -> Iterator[str]:
    """What was measured. `step_s`: the first is stock none's."""
    first, *others = step_s
    yield "steps by stock none's: " + ", ".join(f"{name} {step_s[name] / step_s[first]:.2f}" for name in others)
    shares = (f"{found.accompanied} of {len(found.collectives)} ({name})" for name, found in profiled.items())
    yield f"NCCL kernels beside which recomputation ran: {', '.join(shares)}"
