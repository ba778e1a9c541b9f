"""The outcome file: predicted and measured figures of a run under a plan, by stage.

Rank 0 writes it at steps 1 and 2 and when the run ends. An unknown figure is null: a plan may predict nothing, and a machine
without a GPU reserves no memory.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from megatron_lynx.anatomy import EXPERTS
from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.figures import MOST, Figure, Figures, Learned, in_words, of_slowest
from megatron_lynx.timeline import Span, nested
from megatron_lynx.units import format_bytes
from megatron_lynx.validation import Part, formerly, validated
from megatron_lynx.whole_file import json_in, write_whole

VERSION = 1
FILE_NAME = "lynx_outcome.json"


class StagePredicted(Part):
    passes_s: Annotated[float | None, Figure(max, "predicted_passes_s")] = None
    """Forwards and backwards of one step, over all stages."""
    memory_bytes: Annotated[int | None, Figure(max, "predicted_device_peak_bytes")] = None
    """Peak of a device, everything included."""
    hidden_recompute_s: Annotated[float | None, formerly("hidden_recompute_s", "hidden_replay_s")] = None
    exposed_recompute_s: Annotated[float | None, formerly("exposed_recompute_s", "exposed_replay_s")] = None
    """Recomputations of one step on one rank."""
    exposed_copy_s: float | None = None


class PartSeconds(Part):
    """All halves of one kind, or all waits at one place, on a stage's ranks in one traced step."""

    model_config = ConfigDict(extra="ignore")  # older files state them in another way

    count: int = 0
    seconds: float = 0.0

    def __add__(self, other: PartSeconds) -> PartSeconds:
        return PartSeconds(count=self.count + other.count, seconds=self.seconds + other.seconds)


Parts = dict[str, PartSeconds]
"""By part of the profile (attention, mlp, experts): forwards, and the seconds of forwards and backwards at their medians and of
delayed weight gradients, without waits and recomputations. By place, as in plans, with the part of the profile for the half
(`fwd.experts.0`): waits that outlast the work in them, and their lengths, the communication that was left when they began."""


def added(traced: Iterable[Parts]) -> Parts:
    sums: Parts = {}
    for parts in traced:
        sums |= {name: sums.get(name, PartSeconds()) + part for name, part in parts.items()}
    return sums


COMPUTING = ("forward", "backward")

OVER = 0.02
"""A wait ends before the work in it if at most this fraction of it remains after the work."""


def parts_of(spans: Sequence[Span], has_experts: Callable[[int], bool]) -> Parts:
    """Split one rank's step into halves and waits. `has_experts` takes the number of a layer.

    spans, nested               backward mlp(3) ┬ window bwd.mlp.0@3 ┬ recompute attention(3)    in the wait
                                                │                    └ (the rest of the wait)
                                                └ recompute mlp(3)                               on demand
    compute of a half           its forward and backward without the spans inside, and its delayed weight gradients
    a wait                      the communication, if longer than the work inside; else only an upper bound

    Receives between stages are left out: their length depends on other stages.
    """
    halves: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    waits: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for span, inside in _nested(span for span in spans if span.kind not in ("offload", "reload")):
        own_s = span.end_s - span.start_s - sum(inner_span.end_s - inner_span.start_s for inner_span in inside)
        if span.kind in COMPUTING or span.kind == "weight_gradient":
            halves[_kind(span.half, span.layer, has_experts)][span.kind].append(own_s)
        elif span.kind == "window":
            name, _, layer = str(span.window).partition("@")
            passing, half, ordinal = name.split(".")
            place = f"{passing}.{_kind(half, int(layer), has_experts)}.{ordinal}"
            waits[place].append((span.end_s - span.start_s, own_s))
    of_halves = {kind: _half(seconds_by_kind) for kind, seconds_by_kind in sorted(halves.items())}
    return of_halves | {place: _waits(wait_times) for place, wait_times in sorted(waits.items())}


def _half(seconds_by_kind: Mapping[str, Sequence[float]]) -> PartSeconds:
    """`seconds_by_kind`: seconds by kind of span. The median is used for passes, as other work may have delayed some."""
    seconds = sum(
        len(seconds_by_kind[passing]) * median(seconds_by_kind[passing]) for passing in COMPUTING if seconds_by_kind[passing]
    )
    return PartSeconds(count=len(seconds_by_kind["forward"]), seconds=seconds + sum(seconds_by_kind["weight_gradient"]))


def _waits(wait_times: Sequence[tuple[float, float]]) -> PartSeconds:
    """`wait_times`: for each wait its length, and its rest after the work in it."""
    longer = [whole_s for whole_s, rest_s in wait_times if rest_s > OVER * whole_s]
    return PartSeconds(count=len(longer), seconds=sum(longer))


def _kind(half: str | None, layer: int | None, has_experts: Callable[[int], bool]) -> str:
    return "experts" if half == EXPERTS.half and layer is not None and has_experts(layer) else str(half)


def _nested(spans: Iterable[Span]) -> Iterator[tuple[Span, list[Span]]]:
    around: list[tuple[Span, list[Span]]] = []
    for span in nested(spans):
        while around and around[-1][0].end_s < span.end_s:
            yield around.pop()
        if around:
            around[-1][1].append(span)
        around.append((span, []))
    yield from reversed(around)


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
    parts: Parts | None = None
    """null: no step was traced (a short run, a checked one, an older file)."""


def stage_of(ranks: Sequence[StageMeasured]) -> StageMeasured:
    traced = [rank.parts for rank in ranks if rank.parts is not None]
    parts = added(traced) if traced else None
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
        return abs(self.tokens - 1) < TOLERANCE

    @property
    def usual(self) -> bool:
        """Whether micro-batches had the planned work, in whatever number."""
        return self.full and abs(self.squares - 1) < TOLERANCE

    @property
    def as_planned(self) -> bool:
        return self.usual and abs(self.microbatches / self.planned_microbatches - 1) < TOLERANCE


class Report(Part):
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
    ("passes", "predicted", "passes_s"),
    ("passes", "measured", "passes_s"),
    ("whole", "step", "step_s"),
    ("hidden", "predicted", "hidden_recompute_s"),
    ("hidden", "in windows", "in_windows_s"),
    ("exposed", "predicted", "exposed_recompute_s"),
    ("exposed", "on demand", "on_demand_s"),
)
"""Columns of tables: two lines of the heading, and the figure. Hidden and exposed are seconds of recomputations."""


UNKNOWN = "-"
HEADINGS = (("", "stage"), *((group, heading) for group, heading, _ in COLUMNS), ("in windows", "+ on demand"))
BETWEEN = "  "


def lines(report: Report) -> list[str]:
    cells = [*zip(*HEADINGS, strict=True), *(_cells(report, row) for row in report.stages)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    table = [BETWEEN.join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    title = f"step {report.step} of this run, beside what its plan predicts:"
    if report.when == "end":
        title = f"how this run of {report.step} steps came out (seconds of a usual step, the most bytes of all):"
    return [title, *(f"  {line}".rstrip() for line in (*table, *_notes(report)))]


def _cells(report: Report, row: StageRow) -> tuple[str, ...]:
    figures = zip(COLUMNS, report.cells(row), strict=True)
    cells = (UNKNOWN if figure is None else in_words(name, figure) for (_, _, name), figure in figures)
    return (str(row.stage), *cells, f"{row.measured.in_windows} + {row.measured.on_demand}")


def _notes(report: Report) -> list[str]:
    predicted = [row.predicted for row in report.stages if row.predicted is not None]
    notes = [] if predicted else ["the plan predicts nothing"]
    if any(stage.memory_bytes is None for stage in predicted):
        notes.append("the plan does not say what a device holds")
    if all(row.measured.allocated_bytes is None for row in report.stages):
        notes.append("bytes: not measured, as something else profiles, or PyTorch does not tell")
    return [*notes, *_met(report), *_reserve(report), *_load(report)]


def _met(report: Report) -> Iterator[str]:
    if (met := report.met) is None:
        return
    came = f"{met.microbatches:.3g} of {met.planned_microbatches} micro-batches"
    full = f"{100 * met.tokens:.3g} % of their tokens, {100 * met.squares:.3g} % of the squares of lengths"
    yield f"what came: {came}, {full}"
    alone = "" if met.by_squares else ", by tokens alone: the plan does not say what attention takes"
    yield f"predicted seconds are for that: the plan's x {met.passes:.3f}{alone}; predicted bytes are the plan's, the most"


def _reserve(report: Report) -> Iterator[str]:
    outside = [row.measured.outside_bytes for row in report.stages if row.measured.outside_bytes is not None]
    slack = [row.measured.slack_bytes for row in report.stages if row.measured.slack_bytes is not None]
    if not outside or not slack:
        return
    planned = (None, None) if report.reserve is None else (report.reserve.outside_bytes, report.reserve.slack_bytes)
    outside_use = f"{_used(max(outside), planned[0])} outside PyTorch's allocator (context, libraries, NCCL)"
    yield f"reserve: {outside_use}, {_used(max(slack), planned[1])} reserved and not allocated"


def _used(used_bytes: int, planned: int | None) -> str:
    return format_bytes(used_bytes) if planned is None else f"{format_bytes(used_bytes)} of {format_bytes(planned)} used"


def _load(report: Report) -> Iterator[str]:
    fullest = max(report.stages, key=lambda row: row.measured.expert_load)
    if report.planned_load is None or not fullest.measured.expert_load:
        return
    load = f"experts: stage {fullest.stage} had a rank with {fullest.measured.expert_load:.2f} of a balanced share of tokens"
    planned = f"its plan was made for {report.planned_load:.2f}"
    more = ": expect more bytes and seconds than predicted" if fullest.measured.expert_load > report.planned_load else ""
    yield f"{load}, {planned}{more}"
    fallen = max(report.stages, key=lambda row: row.measured.fell_back)
    if fallen.measured.fell_back:
        often = f"{fallen.measured.fell_back} halves of a step fell back on stage {fallen.stage}"
        yield f"experts: {often}, whose bytes hold for less: plan for more with --experts-hold"


class RunOutcome(Part):
    version: Literal[1] = 1
    made_by: str
    megatron_core: str
    plan: str
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
    write_whole(path, json.dumps(outcome.model_dump(mode="json"), indent=1) + "\n")


def load_outcome(path: str | os.PathLike[str]) -> RunOutcome:
    where = os.fspath(path)
    data = json_in(path, f"the {FILE_NAME} of a launch under a plan")
    version = data.get("version")
    if isinstance(version, int) and version > VERSION:
        todo = "read it with the megatron-lynx that wrote it, or a later one"
        raise ConfigError(f"{where} is from the future", [Problem(f"{where}: version", str(version), str(VERSION), todo)])
    return validated(RunOutcome, data, where)
