"""Measures a run under a plan, and reports figures of each stage next to the plan's predictions.

    step of this run    1           2           3        4           5 ...          the loop ends
    measured            timed,      timed,      traced   timed       (8, 16, ...)
                        counted     counted
    reported            a table     a table                                         a table

Every step is timed by events, without waiting. Recomputations are timed in the steps marked "timed", memory on a CPU is counted
in the steps marked "counted". The third step is traced for `StepParts`. Traced and checked steps are left out of the medians, and
the next step takes their place. All ranks gather for each table.

Seconds of steps, from events of the device, and peaks of device memory.

    step k  [begin] ... schedule: [first] passes [last] ... update ... [end]

CUDA    peaks of the caching allocator since the run began, and bytes used outside it (context, libraries, NCCL, other processes)
a CPU   allocated bytes of the first two steps, from PyTorch's profiler (`measure.memory`), or of all steps in a
        dispatch mode that counts them (`most_bytes`). Host memory for offloading is not counted

Rows of a report, one for each stage: figures of its ranks joined, and predictions scaled to the run's input.

A traced step is split into halves and waits:

    spans of a rank, nested     backward mlp(3) ┬ window bwd.mlp.0@3 ┬ recompute attention(3)    in the wait
                                                │                    └ (the rest of the wait)
                                                └ recompute mlp(3)                               on demand
    compute of a half           its forward and backward without the spans inside, and its delayed weight gradients
    a wait                      the communication, if longer than the work inside; else only an upper bound

Receives between stages are left out: their length depends on other stages.

Predicted seconds are scaled to the run's micro-batches:

    passes          x  (m + f) / (M + f)  x  [(1 - a) t + a q]   m, M   micro-batches, planned ones
    recomputations  x   m / M             x  [(1 - a) t + a q]   f      the filling of the pipeline, in micro-batches
                                                                 t      tokens of one, over those of a full one
                                                                 q      squares of its lengths, over the planned ones
                                                                 a      core attention's share of the passes; 0 if unknown
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import wraps
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from megatron_lynx.anatomy import EXPERTS
from megatron_lynx.anatomy.address import ON_DEMAND
from megatron_lynx.apply.releases import installed_version
from megatron_lynx.environment import records_operands
from megatron_lynx.errors import ConfigError, LynxError
from megatron_lynx.figures import Figures, InputSeen, in_words, logged
from megatron_lynx.launch.ending import gathered_on_rank_0, on_rank_0
from megatron_lynx.measure.memory import CpuMeter, remember_blocks
from megatron_lynx.measure.run_outcome import (
    COLUMNS,
    FILE_NAME,
    HalfSeconds,
    PlannedReserve,
    Report,
    RunOutcome,
    StageMeasured,
    StagePredicted,
    StageRow,
    StepInput,
    StepParts,
    WaitSeconds,
    save_outcome,
    stage_of,
)
from megatron_lynx.plan import Plan
from megatron_lynx.runtime.device import Clock, Device
from megatron_lynx.runtime.engine import Engine
from megatron_lynx.timeline import Span
from megatron_lynx.units import format_bytes
from megatron_lynx.version import __version__

ON_COPY_STREAMS = ("offload", "reload")
COMPUTING = ("forward", "backward")

OVER = 0.02
"""A wait ends before the work in it if at most this fraction of it remains after the work."""


def rows(plan: Plan, ranks: Iterable[tuple[int, StageMeasured]]) -> tuple[StageRow, ...]:
    stages: dict[int, list[StageMeasured]] = defaultdict(list)
    for stage, measured in ranks:
        stages[stage].append(measured)
    return tuple(
        StageRow(stage=stage, predicted=predicted_of(plan, stage), measured=stage_of(measured))
        for stage, measured in sorted(stages.items())
    )


def predicted_of(plan: Plan, stage: int) -> StagePredicted | None:
    chunks = [entry.predicted for entry in plan.chunks_of(stage)]
    first = chunks[0]
    if first.step_s is None and not first.memory_bytes:
        return None
    rehearsed = first.step_s is not None
    return StagePredicted(
        passes_s=first.step_s,
        memory_bytes=first.memory_bytes or None,
        hidden_recompute_s=sum(chunk.hidden_recompute_s for chunk in chunks) if rehearsed else None,
        exposed_recompute_s=sum(chunk.exposed_recompute_s for chunk in chunks) if rehearsed else None,
        exposed_copy_s=first.exposed_copy_s if rehearsed else None,
    )


def reserve_of(plan: Plan) -> PlannedReserve | None:
    """The plan's reserve; None if it is not split into parts."""
    device = plan.device
    if device is None or device.outside_bytes is None or device.slack_bytes is None:
        return None
    return PlannedReserve(outside_bytes=device.outside_bytes, slack_bytes=device.slack_bytes)


def step_input(plan: Plan, seen: InputSeen, steps: int, shards: int) -> StepInput | None:
    """The input of one rank over `steps`; None without attention. Waits for the device if lengths are on it."""
    if not seen.microbatches or not steps:
        return None
    full, packed = plan.model.seq * plan.batch.micro, plan.batch.packed
    microbatches, planned = seen.microbatches / steps, plan.batch.microbatches
    tokens = seen.tokens * shards / (seen.microbatches * full)
    per_token = plan.model.seq if packed is None else packed.squares_per_token
    squares = float(seen.squares) / (seen.microbatches * full * per_token)
    core = 0.0 if packed is None else packed.core_share
    of_full = (1 - core) * tokens + core * squares
    return StepInput(
        microbatches=microbatches,
        planned_microbatches=planned,
        tokens=tokens,
        squares=squares,
        by_squares=packed is not None,
        passes=of_full * plan.passes(microbatches) / plan.passes(planned),
        recomputations=of_full * microbatches / planned,
    )


def largest_input(inputs: Iterable[StepInput | None]) -> StepInput | None:
    """The input of the rank with most work, which determines the step; None if it was as planned, or is unknown."""
    fullest = max((met for met in inputs if met is not None), key=lambda met: met.passes, default=None)
    return None if fullest is None or fullest.as_planned else fullest


def parts_of(spans: Sequence[Span], has_experts: Callable[[int], bool]) -> StepParts:
    """Split one rank's step. `has_experts` takes the number of a layer."""
    halves: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    waits: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for span, inside in _nested(span for span in spans if span.kind not in ON_COPY_STREAMS):
        own_s = span.end_s - span.start_s - sum(inner_span.end_s - inner_span.start_s for inner_span in inside)
        if span.kind in COMPUTING or span.kind == "weight_gradient":
            halves[_kind(span.half, span.layer, has_experts)][span.kind].append(own_s)
        elif span.kind == "window":
            name, _, layer = str(span.window).partition("@")
            passing, half, ordinal = name.split(".")
            place = f"{passing}.{_kind(half, int(layer), has_experts)}.{ordinal}"
            waits[place].append((span.end_s - span.start_s, own_s))
    return StepParts(
        halves={kind: _half(seconds_by_kind) for kind, seconds_by_kind in sorted(halves.items())},
        waits={place: _waits(wait_times) for place, wait_times in sorted(waits.items())},
    )


def _half(seconds_by_kind: Mapping[str, Sequence[float]]) -> HalfSeconds:
    """`seconds_by_kind`: seconds by kind of span. The median is used for passes, as other work may have delayed some."""
    seconds = sum(
        len(seconds_by_kind[passing]) * median(seconds_by_kind[passing]) for passing in COMPUTING if seconds_by_kind[passing]
    )
    return HalfSeconds(calls=len(seconds_by_kind["forward"]), seconds=seconds + sum(seconds_by_kind["weight_gradient"]))


def _waits(wait_times: Sequence[tuple[float, float]]) -> WaitSeconds:
    """`wait_times`: for each wait its length, and its rest after the work in it."""
    longer = [whole_s for whole_s, rest_s in wait_times if rest_s > OVER * whole_s]
    return WaitSeconds(longer=len(longer), longer_s=sum(longer))


def _kind(half: str | None, layer: int | None, has_experts: Callable[[int], bool]) -> str:
    return "experts" if half == EXPERTS.half and layer is not None and has_experts(layer) else str(half)


def _nested(spans: Iterable[Span]) -> Iterator[tuple[Span, list[Span]]]:
    around: list[tuple[Span, list[Span]]] = []
    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
        while around and around[-1][0].end_s < span.end_s:
            yield around.pop()
        if around:
            around[-1][1].append(span)
        around.append((span, []))
    yield from reversed(around)


REMEMBERED = 1000


class StepSeconds(NamedTuple):
    passes_s: float
    """Megatron's schedule, including the reduction of gradients."""
    step_s: float


class StepClock:
    def __init__(self, device: Device) -> None:
        self._clock = Clock(device)
        self._passes_s = 0.0
        self._steps: deque[StepSeconds] = deque(maxlen=REMEMBERED)

    @contextmanager
    def step(self, arguments: dict[str, Any], *, counts: bool) -> Iterator[None]:
        """Time one step if it `counts`. `arguments`: those of Megatron's `train_step`."""
        self._clock.runs = counts
        arguments["forward_backward_func"] = self._around(arguments["forward_backward_func"])
        begin = self._clock.begin()
        yield
        self._clock.end("step", begin)
        self._take(exact=False)

    def _around(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(schedule)
        def forward_backward(*args: Any, **kwargs: Any) -> Any:
            begin = self._clock.begin()
            result = schedule(*args, **kwargs)
            self._clock.end("passes", begin)
            return result

        return forward_backward

    def _take(self, *, exact: bool) -> None:
        for what, seconds in self._clock.take(exact=exact):
            if what == "passes":
                self._passes_s += seconds
            else:
                self._steps.append(StepSeconds(self._passes_s, seconds))
                self._passes_s = 0.0

    def latest(self) -> StepSeconds | None:
        """Seconds of the latest step. Waits for the device."""
        self._take(exact=True)
        return self.known()

    def known(self) -> StepSeconds | None:
        """Seconds of the latest step that the device has finished. Does not wait."""
        return self._steps[-1] if self._steps else None

    def forget(self) -> None:
        self._take(exact=True)
        self._steps.clear()

    def usual(self) -> StepSeconds | None:
        """Medians of the steps. Waits for the device."""
        self._take(exact=True)
        return StepSeconds(*map(median, zip(*self._steps, strict=True))) if self._steps else None


class Peak(NamedTuple):
    allocated_bytes: int | None
    reserved_bytes: int | None
    outside_bytes: int | None = None
    """Used on the device outside PyTorch's allocator; None if unknown."""

    @property
    def slack_bytes(self) -> int | None:
        if self.allocated_bytes is None or self.reserved_bytes is None:
            return None
        return self.reserved_bytes - self.allocated_bytes


class DevicePeak:
    """Peaks of one rank. Must be created before the model: on a CPU, older tensors are not counted."""

    def __init__(self) -> None:
        where = torch.empty(0, device="cuda").device  # the CPU, if it stands in for CUDA in tests
        self._on_cuda = where.type == "cuda"
        self._counts = False
        if not self._on_cuda:
            with suppress(LynxError):  # this build of PyTorch hides it; the table says that memory is not measured
                remember_blocks()
                self._counts = True
        self._most_bytes: int | None = None

    @contextmanager
    def counting(self) -> Iterator[None]:
        busy = torch.autograd._profiler_enabled() or _get_current_dispatch_mode() is not None  # type: ignore[attr-defined]
        if not self._counts or busy:
            yield
            return
        with CpuMeter() as meter:
            yield
        self._most_bytes = max(self._most_bytes or 0, meter.use.level_bytes + meter.use.peak_bytes)

    def peak(self) -> Peak:
        if self._on_cuda:
            return Peak(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
        if (most_bytes := getattr(_get_current_dispatch_mode(), "most_bytes", None)) is not None:
            return Peak(most_bytes, None)
        return Peak(self._most_bytes, None)

    def with_outside(self) -> Peak:
        """`peak` with `outside_bytes`, which is too slow to read in every step."""
        peak = self.peak()
        if not self._on_cuda:
            return peak
        free_bytes, all_bytes = torch.cuda.mem_get_info()
        return peak._replace(outside_bytes=all_bytes - free_bytes - torch.cuda.memory_reserved())


UNKNOWN = "-"
HEADINGS = (("", "stage"), *((group, heading) for group, heading, _ in COLUMNS), ("in windows", "+ on demand"))
BETWEEN = "  "


def lines(report: Report) -> list[str]:
    cells = [tuple(name for _, name in HEADINGS), *(_cells(report, row) for row in report.stages)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    heading = _heading(widths)
    table = [BETWEEN.join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return [_title(report), *(f"  {line}".rstrip() for line in (heading, *table, *_notes(report)))]


def _heading(widths: list[int]) -> str:
    """Names of groups, right-aligned over their columns. Widens the first column of a group that is narrower than its name."""
    names, column = [], 0
    for name, group in groupby(HEADINGS, key=lambda heading: heading[0]):
        size = len(list(group))
        width = sum(widths[column : column + size]) + len(BETWEEN) * (size - 1)
        widths[column] += max(0, len(name) - width)
        names.append(name.rjust(max(width, len(name))))
        column += size
    return BETWEEN.join(names)


def _title(report: Report) -> str:
    if report.when == "end":
        return f"how this run of {report.step} steps came out (seconds of a usual step, the most bytes of all):"
    return f"step {report.step} of this run, beside what its plan predicts:"


def _cells(report: Report, row: StageRow) -> tuple[str, ...]:
    figures = zip(COLUMNS, report.cells(row), strict=True)
    cells = (UNKNOWN if figure is None else in_words(name, figure) for (_, _, name), figure in figures)
    return (str(row.stage), *cells, f"{row.measured.in_windows} + {row.measured.on_demand}")


def _notes(report: Report) -> list[str]:
    silent = [row.stage for row in report.stages if row.predicted is None]
    forgetful = [row.stage for row in report.stages if row.predicted is not None and row.predicted.memory_bytes is None]
    untimed = all(row.measured.step_s is None for row in report.stages)
    uncounted = all(row.measured.allocated_bytes is None for row in report.stages)
    notes = [f"{_stages(silent)}: the plan predicts nothing"] if silent else []
    notes += [f"{_stages(forgetful)}: the plan does not say what a device holds"] if forgetful else []
    notes += ["seconds: not measured, as this step ran more than once, to be checked, or was traced"] if untimed else []
    notes += ["bytes: not measured, as something else profiles, or PyTorch does not tell"] if uncounted else []
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


def _stages(stages: Sequence[int]) -> str:
    if len(stages) == 1:
        return f"stage {stages[0]}"
    together = list(stages) == list(range(stages[0], stages[-1] + 1))
    return f"stages {stages[0]}-{stages[-1]}" if together else f"stages {', '.join(map(str, stages))}"


FIRST = 2

TRACED = FIRST + 1


def path_of(stated: Path | None, trace: Path | None, logs: str | None) -> Path | None:
    """Path of the outcome file: the given one, else beside the trace, else in TensorBoard's folder, else None."""
    folder = trace.parent if trace is not None else Path(logs) if logs else None
    return stated or (folder / FILE_NAME if folder is not None else None)


class Reporter:
    """`path`: of the outcome file, if any. `shards`: ranks that share a sequence. `checked`: compared with stock."""

    def __init__(
        self,
        engine: Engine,
        device: Device,
        peak: DevicePeak,
        plan: Plan,
        stage: int,
        plan_path: str,
        path: Path | None,
        *,
        shards: int = 1,
        checked: bool = False,
    ) -> None:
        self._engine, self._clock, self._peak = engine, StepClock(device), peak
        self._plan, self._stage, self._plan_path, self._path = plan, stage, plan_path, path
        self._checked, self._shards = checked, shards
        self._step = self._measured = 0
        self._known: dict[str, Any] = {}
        """Latest figures of this rank, by name; `expert_load` and `fell_back` are maxima over all steps."""
        self._seen, self._steps_seen = InputSeen(), 0
        self._input: StepInput | None = None
        self._reports: list[Report] = []

    @contextmanager
    def step(self, arguments: dict[str, Any], *, usual: bool) -> Iterator[None]:
        """Measure one step. `arguments`: those of Megatron's `train_step`. `usual`: neither checked nor traced."""
        self._step += 1
        self._measured += usual
        self._engine.clock.runs = timed = usual and self._is_timed
        traced = usual and self._measured == TRACED and not records_operands(torch.__version__, os.environ)
        self._engine.met = InputSeen()
        counted = self._peak.counting() if usual and self._measured <= FIRST else nullcontext()
        with self._clock.step(arguments, counts=usual and not traced), counted, self._tracing(traced):
            yield
        if usual and not traced:
            self._seen, self._steps_seen = self._seen + self._engine.met, self._steps_seen + 1
        self._engine.met = None
        if timed:
            self._known |= {"in_windows_s": 0.0, "on_demand_s": 0.0}
            for window, seconds in self._engine.clock.take():
                self._known["on_demand_s" if window == ON_DEMAND else "in_windows_s"] += seconds
        self._engine.clock.runs = False

    @contextmanager
    def _tracing(self, traced: bool) -> Iterator[None]:
        """Trace the step. A traced step also has windows without work in them; before torch 2.8 these may hold memory."""
        if not traced:
            yield
            return
        self._engine.trace.start()
        yield
        self._known["parts"] = parts_of(self._engine.trace.stop(), self._plan.model.has_experts)

    def step_ends(self, counts: Figures, *, usual: bool) -> None:
        largest = {name: max(self._known.get(name, 0), getattr(counts, name)) for name in ("expert_load", "fell_back")}
        self._known |= (_known(counts) if usual else {}) | largest
        if usual and self._measured <= FIRST:
            self._report("step", self._clock.latest())
            self._clock.forget()

    def ends(self) -> None:
        if self._measured:
            self._report("end", self._clock.usual())

    def logged(self, counts: Figures) -> dict[str, float | None]:
        """Figures of the step with these counts, by their names in logs. Does not wait for the device."""
        predicted = predicted_of(self._plan, self._stage) or StagePredicted()
        return logged(self._figures(self._clock.known(), self._peak.peak(), _known(counts))) | logged(predicted)

    def _figures(self, seconds: StepSeconds | None, peak: Peak, counts: Mapping[str, Any]) -> StageMeasured:
        figures = self._known | dict(counts) | (seconds._asdict() if seconds else {}) | peak._asdict()
        return StageMeasured(ranks=1, slack_bytes=peak.slack_bytes, **figures)

    @property
    def _is_timed(self) -> bool:
        """Usual steps 1, 2, 4, 8, ..."""
        return self._measured & (self._measured - 1) == 0

    def _report(self, when: Literal["step", "end"], seconds: StepSeconds | None) -> None:
        self._known |= seconds._asdict() if seconds else {}
        if self._steps_seen:
            self._input = step_input(self._plan, self._seen, self._steps_seen, self._shards)
            self._seen, self._steps_seen = InputSeen(), 0
        figures = self._figures(None, self._peak.with_outside(), {})
        if not (ranks := gathered_on_rank_0((self._stage, figures, self._input))):
            return
        load = self._plan.model.moe_load if self._plan.model.moe_layers else None
        report = Report(
            when=when,
            step=self._step,
            stages=rows(self._plan, [(stage, measured) for stage, measured, _ in ranks]),
            planned_load=load,
            reserve=reserve_of(self._plan),
            met=largest_input(step_input for _, _, step_input in ranks),
        )
        self._reports.append(report)
        on_rank_0("megatron-lynx: " + "\n".join(lines(report)))
        if self._path is not None:
            self._write(self._path, finished=when == "end", ranks=len(ranks))

    def _write(self, path: Path, finished: bool, ranks: int) -> None:
        origin = self._plan.provenance
        outcome = RunOutcome(
            made_by=f"megatron-lynx {__version__}",
            megatron_core=installed_version(),
            plan=self._plan_path,
            plan_digest=self._plan.digest,
            job_digest=origin.job,
            profile_digest=origin.profile,
            asked=origin.asked,
            learned=origin.learned,
            checked=self._checked,
            ranks=ranks,
            finished=finished,
            reports=tuple(self._reports),
        )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_outcome(outcome, path)
        except (ConfigError, OSError) as error:  # the disk is full, say: no reason to stop training
            on_rank_0(f"megatron-lynx: the outcome is not written: {error}")


def _known(figures: Figures) -> dict[str, Any]:
    return {name: value for name, value in vars(figures).items() if value is not None}
