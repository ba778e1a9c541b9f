"""The outcome file: predicted and measured figures of a run under a plan, by stage.

    a run ──> RunOutcome ──save_outcome──> lynx_outcome.json ──load_outcome──> RunOutcome

Rank 0 writes it at steps 1 and 2 and when the run ends. An unknown figure is null: a plan may predict nothing, and a machine
without a GPU reserves no memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar

from pydantic import ConfigDict, Field

from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.figures import MOST, Figure, Figures, Learned, of_slowest
from megatron_lynx.validation import Part, formerly, validated
from megatron_lynx.whole_file import json_in, write_whole

VERSION = 1
FILE_NAME = "lynx_outcome.json"


class StagePredicted(Part):
    """The plan's figures of one stage."""

    passes_s: Annotated[float | None, Figure(max, "predicted_passes_s")] = None
    """Forwards and backwards of one step, over all stages."""
    memory_bytes: Annotated[int | None, Figure(max, "predicted_device_peak_bytes")] = None
    """Peak of a device, everything included."""
    hidden_recompute_s: Annotated[float | None, formerly("hidden_recompute_s", "hidden_replay_s")] = None
    exposed_recompute_s: Annotated[float | None, formerly("exposed_recompute_s", "exposed_replay_s")] = None
    """Recomputations of one step on one rank."""
    exposed_copy_s: float | None = None


class HalfSeconds(Part):
    """All halves of one kind on a stage's ranks, in one step."""

    calls: int = 0
    """Forwards."""
    seconds: float = 0.0
    """Forwards and backwards at their medians, and delayed weight gradients; without waits and recomputations."""


class WaitSeconds(Part):
    """Waits for communication at one place of a half that outlast the work in them, on a stage's ranks, in one step."""

    model_config = ConfigDict(extra="ignore")  # older files also count recomputations

    longer: int = 0
    longer_s: float = 0.0
    """Their length, from the wait's begin: the communication that was left then."""


class StepParts(Part):
    """The parts of one traced step, added up over the ranks of a stage."""

    halves: dict[str, HalfSeconds] = Field(default_factory=dict)
    """By part of the profile: attention, mlp, experts."""
    waits: dict[str, WaitSeconds] = Field(default_factory=dict)
    """By place, as in plans, with the part of the profile for the half: `fwd.experts.0`."""

    def __add__(self, other: StepParts) -> StepParts:
        return StepParts(halves=_sums(self.halves, other.halves), waits=_sums(self.waits, other.waits))


PartT = TypeVar("PartT", HalfSeconds, WaitSeconds)


def _sums(one: dict[str, PartT], other: dict[str, PartT]) -> dict[str, PartT]:
    sums = dict(one)
    for key, more in other.items():
        present = sums.get(key, type(more)())
        sums[key] = type(more)(**{name: getattr(present, name) + getattr(more, name) for name in type(more).model_fields})
    return dict(sorted(sums.items()))


class StageMeasured(Figures):
    """The largest of each figure over a stage's ranks."""

    ranks: int = Field(ge=1)
    passes_s: Annotated[float | None, Figure(max, "passes_s")] = None
    """Megatron's schedule: forwards, backwards, and the reduction of gradients after them."""
    step_s: Annotated[float | None, Figure(max, "step_s")] = None
    allocated_bytes: Annotated[int | None, Figure(max, "device_peak_bytes")] = None
    """Peak on the device since the run began."""
    reserved_bytes: Annotated[int | None, Figure(max, "device_reserved_peak_bytes")] = None
    """Peak of PyTorch's caching allocator; null on a CPU."""
    outside_bytes: Annotated[int | None, MOST] = None
    """Used on the device outside PyTorch's allocator: context, libraries, NCCL; null where unknown."""
    slack_bytes: Annotated[int | None, MOST] = None
    """reserved_bytes - allocated_bytes of one rank."""
    parts: StepParts | None = None
    """null: no step was traced (a short run, a checked one, an older file)."""


def stage_of(ranks: Sequence[StageMeasured]) -> StageMeasured:
    traced = [rank.parts for rank in ranks if rank.parts is not None]
    parts = sum(traced[1:], start=traced[0]) if traced else None
    return StageMeasured(ranks=sum(rank.ranks for rank in ranks), parts=parts, **of_slowest(ranks))


class StageRow(Part):
    stage: int = Field(ge=0)
    predicted: StagePredicted | None = None
    """null: the plan predicts nothing."""
    measured: StageMeasured


class PlannedReserve(Part):
    outside_bytes: int
    """For allocations outside PyTorch."""
    slack_bytes: int
    """For memory that PyTorch reserves without allocating it."""


TOLERANCE = 5e-4
"""Relative; lengths are stated in few digits."""


class StepInput(Part):
    """The input of one rank in a step, relative to the planned one."""

    microbatches: float
    """Mean over the measured steps."""
    planned_microbatches: int
    tokens: float
    """Tokens of a micro-batch, padding included, over a full one's."""
    squares: float
    """The sum of the squares of a micro-batch's lengths, over the planned sum."""
    by_squares: bool
    """Whether the plan states attention's share; otherwise seconds are scaled by tokens alone."""
    passes: float
    """Factor of the plan's seconds of passes."""
    recomputations: Annotated[float, formerly("recomputations", "replays")]
    """Factor of its seconds of recomputations."""

    @property
    def full(self) -> bool:
        """Whether micro-batches had the planned tokens."""
        return abs(self.tokens - 1) < TOLERANCE

    @property
    def usual(self) -> bool:
        """Whether micro-batches had the planned work, in whatever number."""
        return self.full and abs(self.squares - 1) < TOLERANCE

    @property
    def as_planned(self) -> bool:
        return self.usual and abs(self.microbatches / self.planned_microbatches - 1) < TOLERANCE


class Report(Part):
    """All stages at one time."""

    when: Literal["step", "end"]
    """One step; or the end, with medians over the steps."""
    step: int = Field(ge=1)
    """The latest step, counted from 1 in this run."""
    stages: tuple[StageRow, ...] = Field(min_length=1)
    reserve: PlannedReserve | None = None
    planned_load: float | None = None
    """The plan's `expert_load`; null for a model without experts."""
    met: StepInput | None = None
    """Input of the rank with most work; null where it was as planned, and in older files."""

    @property
    def part_of_tokens(self) -> float | None:
        """Tokens of a micro-batch over the planned ones; None where these agree."""
        return None if self.met is None or self.met.full else self.met.tokens

    def predicted_of(self, row: StageRow) -> StagePredicted | None:
        """The plan's figures of a stage, with seconds scaled to the input of this run."""
        if row.predicted is None or self.met is None:
            return row.predicted
        times = {
            "passes_s": self.met.passes,
            "hidden_recompute_s": self.met.recomputations,
            "exposed_recompute_s": self.met.recomputations,
        }
        scaled = {
            name: None if (planned_s := getattr(row.predicted, name)) is None else planned_s * by for name, by in times.items()
        }
        return row.predicted.model_copy(update=scaled)

    def cells(self, row: StageRow) -> tuple[float | None, ...]:
        predicted, measured = self.predicted_of(row) or StagePredicted(), row.measured
        return tuple(getattr(predicted if column == "predicted" else measured, name) for _, column, name in COLUMNS)


COLUMNS = (
    ("peak", "predicted", "memory_bytes"),
    ("peak", "allocated", "allocated_bytes"),
    ("peak", "reserved", "reserved_bytes"),
    ("forwards and backwards", "predicted", "passes_s"),
    ("forwards and backwards", "measured", "passes_s"),
    ("whole", "step", "step_s"),
    ("recomputations hidden", "predicted", "hidden_recompute_s"),
    ("recomputations hidden", "in windows", "in_windows_s"),
    ("recomputations exposed", "predicted", "exposed_recompute_s"),
    ("recomputations exposed", "on demand", "on_demand_s"),
)
"""Columns of tables: group, heading, figure."""


class RunOutcome(Part):
    """How a run came out. Facts that the plan does not state are null."""

    version: Literal[1] = 1
    made_by: str
    megatron_core: str
    plan: str
    """Its path."""
    plan_digest: str
    job_digest: str | None = None
    profile_digest: str | None = None
    """The plan's profile, without corrections by an earlier run."""
    asked: str | None = None
    """The command line of `plan`."""
    learned: Learned | None = None
    """Corrections by an earlier run, with which the plan was made."""
    checked: bool = False
    """Whether `--lynx-check` also ran stock's steps, which may have set the peaks."""
    ranks: int = Field(ge=1)
    finished: bool
    reports: tuple[Report, ...] = Field(min_length=1)


def save_outcome(outcome: RunOutcome, path: str | os.PathLike[str]) -> None:
    """Raises `ConfigError` where the file cannot be written; an older one is then unchanged."""
    write_whole(path, json.dumps(outcome.model_dump(mode="json"), indent=1) + "\n")


def load_outcome(path: str | os.PathLike[str]) -> RunOutcome:
    """Raises `ConfigError` where there is none, where it is cut off, and with all invalid places."""
    where = os.fspath(path)
    data = json_in(path, f"the {FILE_NAME} of a launch under a plan")
    version = data.get("version")
    if isinstance(version, int) and version > VERSION:
        todo = "read it with the megatron-lynx that wrote it, or a later one"
        raise ConfigError(f"{where} is from the future", [Problem(f"{where}: version", str(version), str(VERSION), todo)])
    return validated(RunOutcome, data, where)
