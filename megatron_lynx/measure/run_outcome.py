"""The outcome file: how a run under a plan came out, stage by stage, beside what its plan had predicted.

    a run ──> RunOutcome ──save_outcome──> lynx_outcome.json ──load_outcome──> RunOutcome

It is written whole at steps 1 and 2 and when the run ends, so whoever reads it finds a run that goes on, or one that finished; a
run that breaks off leaves what was known before. A figure that nobody knows is null: a plan may predict nothing, and on a machine
without a GPU no memory is reserved.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar

from pydantic import Field

from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.figures import MOST, Figure, Figures, of_slowest
from megatron_lynx.learned import Learned
from megatron_lynx.validation import Part, validated
from megatron_lynx.whole_file import json_in, write_whole

VERSION = 1
FILE_NAME = "lynx_outcome.json"


class StagePredicted(Part):
    """What the plan says of one stage."""

    passes_s: Annotated[float | None, Figure(max, "predicted_passes_s")] = None
    """Seconds of a step's forwards and backwards over all stages."""
    memory_bytes: Annotated[int | None, Figure(max, "predicted_device_peak_bytes")] = None
    """Everything on a device at its fullest."""
    hidden_replay_s: float | None = None
    exposed_replay_s: float | None = None
    """Seconds of one step's recomputations, on one rank."""
    exposed_copy_s: float | None = None
    """Seconds for which one step waits for copies from the host."""


class HalfSeconds(Part):
    """Of all halves of one kind on a stage's ranks, in one step."""

    calls: int = 0
    """Forwards of such a half."""
    seconds: float = 0.0
    """As many forwards and backwards as there were, each counted as the usual one, and weight gradients that ran elsewhere;
    without waits, recomputations and waits for copies."""


class WaitSeconds(Part):
    """Of all waits for communication at one place of a half, on a stage's ranks, in one step."""

    longer: int = 0
    """Waits that went on after what ran in them."""
    longer_s: float = 0.0
    """Seconds from where these were waited for to their ends: what is left there of the communication."""
    longer_replays_s: float = 0.0
    """Seconds of recomputations in these, which they hid."""
    shorter: int = 0
    """Waits that were over before what ran in them."""
    shorter_replays_s: float = 0.0
    """Seconds of recomputations in those, which they hid at most."""


class StepParts(Part):
    """What one traced step consisted of, added up over the ranks of a stage."""

    halves: dict[str, HalfSeconds] = Field(default_factory=dict)
    """By part of the profile: attention, mlp, experts."""
    waits: dict[str, WaitSeconds] = Field(default_factory=dict)
    """By place, as in plans, with the part of the profile for the half: `fwd.experts.0`."""

    def __add__(self, other: StepParts) -> StepParts:
        return StepParts(halves=_sums(self.halves, other.halves), waits=_sums(self.waits, other.waits))


PartT = TypeVar("PartT", HalfSeconds, WaitSeconds)


def _sums(one: dict[str, PartT], other: dict[str, PartT]) -> dict[str, PartT]:
    """Both, added up where they have the same keys."""
    sums = dict(one)
    for key, more in other.items():
        own = sums.get(key, type(more)())
        sums[key] = type(more)(**{name: getattr(own, name) + getattr(more, name) for name in type(more).model_fields})
    return dict(sorted(sums.items()))


class StageMeasured(Figures):
    """Of each figure the largest of the stage's ranks."""

    ranks: int = Field(ge=1)
    passes_s: Annotated[float | None, Figure(max, "passes_s")] = None
    """Seconds of Megatron's schedule: forwards, backwards, and the reduction of gradients after them."""
    step_s: Annotated[float | None, Figure(max, "step_s")] = None
    """Seconds of the whole step, with the optimizer's update."""
    allocated_bytes: Annotated[int | None, Figure(max, "device_peak_bytes")] = None
    """The most that was allocated on the device since the run began."""
    reserved_bytes: Annotated[int | None, Figure(max, "device_reserved_peak_bytes")] = None
    """The most that PyTorch's allocator held; null where there is no such allocator."""
    outside_bytes: Annotated[int | None, MOST] = None
    """Used on the device, and not by PyTorch's allocator: context, libraries, NCCL; null where that is not known."""
    slack_bytes: Annotated[int | None, MOST] = None
    """The most that was reserved less the most that was allocated; null where there is no such allocator."""
    parts: StepParts | None = None
    """None: no step was traced for it (a short run, one that is checked; outcome files of before)."""


def stage_of(ranks: Sequence[StageMeasured]) -> StageMeasured:
    """The ranks of one stage as one."""
    traced = [rank.parts for rank in ranks if rank.parts is not None]
    parts = sum(traced[1:], start=traced[0]) if traced else None
    return StageMeasured(ranks=sum(rank.ranks for rank in ranks), parts=parts, **of_slowest(ranks))


class StageRow(Part):
    stage: int = Field(ge=0)
    predicted: StagePredicted | None = None
    """None: the plan predicts nothing."""
    measured: StageMeasured


class PlannedReserve(Part):
    """What a plan left alone on each device."""

    outside_bytes: int
    """For what PyTorch does not allocate."""
    slack_bytes: int
    """For what PyTorch has reserved and not allocated."""


AS_PLANNED = 5e-4
"""What came is as planned where it is off by a smaller part: lengths are stated in few digits."""


class StepMet(Part):
    """What came in a step, of one rank."""

    microbatches: float
    """In the mean of the steps that are told of."""
    planned_microbatches: int
    tokens: float
    """Of a micro-batch, padding included, as a part of a full one's."""
    squares: float
    """The sum of the squares of a micro-batch's lengths, as a part of the planned one."""
    by_squares: bool
    """Whether the plan says what attention takes. Else seconds are taken to go with tokens alone."""
    passes: float
    """By this the plan's seconds of passes are multiplied."""
    replays: float
    """By this those of replays."""

    @property
    def full(self) -> bool:
        """Whether micro-batches held what they were planned to hold."""
        return abs(self.tokens - 1) < AS_PLANNED

    @property
    def usual(self) -> bool:
        """Whether each of them had the work that was planned, however many there were."""
        return self.full and abs(self.squares - 1) < AS_PLANNED

    @property
    def as_planned(self) -> bool:
        return self.usual and abs(self.microbatches / self.planned_microbatches - 1) < AS_PLANNED


class Report(Part):
    """All stages at one time."""

    when: Literal["step", "end"]
    """What one step took, or at the end what a step took as a rule."""
    step: int = Field(ge=1)
    """The latest step, counted from 1 in this run."""
    stages: tuple[StageRow, ...] = Field(min_length=1)
    reserve: PlannedReserve | None = None
    """None: the plan does not say."""
    planned_load: float | None = None
    """The load of experts that the plan was made for, on the same scale as `expert_load`. None: the model has none."""
    met: StepMet | None = None
    """What the rank met that had most to do. None: what was planned, or nobody counted (outcome files of before)."""

    @property
    def part_of_tokens(self) -> float | None:
        """Of the planned tokens, what a micro-batch held; None where that was all."""
        return None if self.met is None or self.met.full else self.met.tokens

    def predicted_of(self, row: StageRow) -> StagePredicted | None:
        """What the plan says of a stage for what came: seconds go by that; bytes are the most, and stay. None: it predicts
        nothing."""
        if row.predicted is None or self.met is None:
            return row.predicted
        times = {"passes_s": self.met.passes, "hidden_replay_s": self.met.replays, "exposed_replay_s": self.met.replays}
        scaled = {name: None if (own := getattr(row.predicted, name)) is None else own * by for name, by in times.items()}
        return row.predicted.model_copy(update=scaled)

    def cells(self, row: StageRow) -> tuple[float | None, ...]:
        """The figures of a stage in the order of `COLUMNS`."""
        predicted, measured = self.predicted_of(row) or StagePredicted(), row.measured
        return (
            predicted.memory_bytes,
            measured.allocated_bytes,
            measured.reserved_bytes,
            predicted.passes_s,
            measured.passes_s,
            measured.step_s,
            predicted.hidden_replay_s,
            measured.in_windows_s,
            predicted.exposed_replay_s,
            measured.on_demand_s,
        )


COLUMNS: tuple[tuple[str, str, Literal["bytes", "s"]], ...] = (
    ("peak", "predicted", "bytes"),
    ("peak", "allocated", "bytes"),
    ("peak", "reserved", "bytes"),
    ("forwards and backwards", "predicted", "s"),
    ("forwards and backwards", "measured", "s"),
    ("whole", "step", "s"),
    ("replays hidden", "predicted", "s"),
    ("replays hidden", "in windows", "s"),
    ("replays exposed", "predicted", "s"),
    ("replays exposed", "on demand", "s"),
)
"""The figures of a stage that tables show: group, name, unit."""


class RunOutcome(Part):
    """How a run came out."""

    version: Literal[1] = 1
    made_by: str
    megatron_core: str
    plan: str
    """Its path."""
    plan_digest: str
    job_digest: str | None = None
    """Of the job that the plan was made for; null where the plan does not say."""
    profile_digest: str | None = None
    """Of the profile that the plan was made with, before anything was learned; null where the plan does not say."""
    asked: str | None = None
    """The words with which the plan was asked for; null where it does not say."""
    learned: Learned | None = None
    """What its plan had been taught by a run before."""
    checked: bool = False
    """Whether steps also ran as stock runs them (`--lynx-check`), which may be what filled the devices."""
    ranks: int = Field(ge=1)
    finished: bool
    """Whether the training loop has ended as it should."""
    reports: tuple[Report, ...] = Field(min_length=1)


def save_outcome(outcome: RunOutcome, path: str | os.PathLike[str]) -> None:
    """Raises `ConfigError` where the file cannot be written; what was there before is there then."""
    write_whole(path, json.dumps(outcome.model_dump(mode="json"), indent=1) + "\n")


def load_outcome(path: str | os.PathLike[str]) -> RunOutcome:
    """The outcome in a file.

    Raises `ConfigError` where there is none, where it ends in the middle, and with every place that is not as it must be.
    """
    where = os.fspath(path)
    data = json_in(path, f"the {FILE_NAME} of a launch under a plan")
    found = data.get("version")
    if isinstance(found, int) and found > VERSION:
        todo = "read it with the megatron-lynx that wrote it, or a later one"
        raise ConfigError(f"{where} is from the future", [Problem(f"{where}: version", str(found), str(VERSION), todo)])
    return validated(RunOutcome, data, where)
