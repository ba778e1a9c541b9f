"""The measurement file: what several settings of one training step took, on one machine, in one run.

    ranks ──RankResult──> Setting ──┐
                          Setting ──┼──> Measurement ──save_measurement──> measurement.json ──compare──> table, report
    machine facts ──────────────────┘

The file holds what was measured: samples, bytes, counts. What follows from it is a property here and a column in
`compare.table`, computed in one place and never stored beside its source.
"""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatron_lynx.figures import MOST, Figures, of_all
from megatron_lynx.measure.machine import Machine
from megatron_lynx.measure.steps import Summary, summarise
from megatron_lynx.validation import Part, validated
from megatron_lynx.whole_file import json_in, write_whole


class Counted(Figures):
    """The figures of a setting in one step."""

    resident_bytes: Annotated[int, MOST]
    """Activations held between forward and backward: the most that was live at the end of any forward pass."""
    peak_bytes: Annotated[int, MOST]
    """The most that was live at any moment of the step. Both are above the level at the step's start."""


class RankResult(Counted):
    """One setting on one rank."""

    rank: int = Field(ge=0)
    step_s: tuple[float, ...] = Field(min_length=1)
    """Seconds of every timed step, in the order of the rounds."""
    gradients_equal: bool | None = None
    """Whether every parameter's gradient equals stock none's in every bit; None where it was not compared."""


class Setting(Part):
    """One setting on all ranks."""

    name: str
    ours: bool
    """A plan of ours, not a setting of stock Megatron."""
    ranks: tuple[RankResult, ...] = Field(min_length=1)

    @property
    def step_samples_s(self) -> tuple[float, ...]:
        """A step takes as long as its slowest rank: one sample per round."""
        return tuple(max(times) for times in zip(*(rank.step_s for rank in self.ranks), strict=True))

    @property
    def step(self) -> Summary:
        return summarise(self.step_samples_s)

    @property
    def figures(self) -> Counted:
        """Counts of all ranks together; bytes and seconds of the rank that has most."""
        return Counted(**of_all(self.ranks))

    @property
    def gradients_equal(self) -> bool | None:
        """Whether gradients equal stock's on every rank: False if one differs, else None if some were not compared."""
        answers = {rank.gradients_equal for rank in self.ranks}
        return False if False in answers else None if None in answers else True

    @model_validator(mode="after")
    def _whole(self) -> Setting:
        problems = []
        found = [rank.rank for rank in self.ranks]
        if found != list(range(len(found))):
            problems.append(f"ranks are {found}, but must be {list(range(len(found)))}, in order")
        if len({len(rank.step_s) for rank in self.ranks}) > 1:
            problems.append(f"ranks have {[len(rank.step_s) for rank in self.ranks]} samples, but all must have one per round")
        if problems:
            raise ValueError("; ".join(problems))
        return self


class Skipped(Part):
    """A setting that did not run, and why."""

    name: str
    reason: str


class CounterCheck(Part):
    """The activation counter against the process's real peak memory, in one step; see `process_peak`."""

    counted_bytes: int
    """Both are above the level at the step's start."""
    process_bytes: int | None = None
    why_not: str | None = None
    """The reason for which the process's peak could not be read."""


class Measurement(Part):
    """Everything of one comparison. The first setting is the one that ratios refer to: stock none."""

    version: Literal[1] = 1
    subject: str
    """What was trained: model, layout, micro-batches."""
    machine: Machine
    device: Literal["cpu", "cuda"]
    """Bytes are counted in another way on each (see `memory`)."""
    warmups: int = Field(ge=0)
    """Steps of each setting that were not timed."""
    settings: tuple[Setting, ...] = Field(min_length=1)
    skipped: tuple[Skipped, ...] = ()
    counter_check: CounterCheck | None = None

    @property
    def reference(self) -> Setting:
        """Stock Megatron without recomputation."""
        return self.settings[0]

    @property
    def rounds(self) -> int:
        return len(self.reference.step_samples_s)

    def exposed_s(self, setting: Setting) -> float:
        """Seconds of a step that recomputation costs: step - step(none), medians. What no window hides, and all side effects."""
        return setting.step.median_s - self.reference.step.median_s

    def ratio_to_none(self, setting: Setting) -> float:
        return setting.step.median_s / self.reference.step.median_s

    @model_validator(mode="after")
    def _comparable(self) -> Measurement:
        problems = []
        names = [setting.name for setting in self.settings]
        problems += [f"setting {name!r} is there twice" for name in dict.fromkeys(names) if names.count(name) > 1]
        if self.reference.ours:
            problems.append(f"the first setting is {names[0]!r}, but ratios refer to the first, which must be stock none")
        for setting in self.settings:
            shape = (len(setting.ranks), len(setting.step_samples_s))
            needed = (len(self.reference.ranks), self.rounds)
            if shape != needed:
                found, wanted = (f"{ranks} ranks and {rounds} rounds" for ranks, rounds in (shape, needed))
                problems.append(f"setting {setting.name!r} has {found}, but {names[0]!r} has {wanted}")
        if problems:
            raise ValueError("; ".join(problems))
        return self


def save_measurement(measurement: Measurement, path: str | os.PathLike[str]) -> None:
    """Write the file whole or not at all. Raises ConfigError where it cannot be written."""
    write_whole(path, measurement.model_dump_json(indent=2) + "\n")


def load_measurement(path: str | os.PathLike[str]) -> Measurement:
    """Raises ConfigError with every problem and its place in the file."""
    return validated(Measurement, json_in(path, "a measurement file (JSON)"), os.fspath(path))
