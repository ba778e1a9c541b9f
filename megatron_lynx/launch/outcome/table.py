"""The lines in which a run says how it came out: a row for each stage, what was predicted beside what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from megatron_lynx.measure.run_outcome import COLUMNS, Report, StageRow
from megatron_lynx.units import format_bytes, format_seconds

UNKNOWN = "-"
UNITS = {"bytes": format_bytes, "s": format_seconds}
HEADINGS = (("", "stage"), *((group, name) for group, name, _ in COLUMNS), ("in windows", "+ on demand"))
BETWEEN = "  "


def lines(report: Report) -> list[str]:
    """What is printed of a report; the first line says of when it is."""
    rows = [tuple(name for _, name in HEADINGS), *(_cells(report, row) for row in report.stages)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    heading = _heading(widths)
    table = [BETWEEN.join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [_title(report), *(f"  {line}".rstrip() for line in (heading, *table, *_notes(report)))]


def _heading(widths: list[int]) -> str:
    """The groups' names, each above the end of its columns; widens the first column of a group that is narrower than its name."""
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
    cells = (UNKNOWN if figure is None else UNITS[unit](figure) for (_, _, unit), figure in figures)
    return (str(row.stage), *cells, f"{row.measured.in_windows} + {row.measured.on_demand}")


def _notes(report: Report) -> list[str]:
    """What is not known, and why."""
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
    """What came, where that is not what the plan was made for."""
    if (met := report.met) is None:
        return
    came = f"{met.microbatches:.3g} of {met.planned_microbatches} micro-batches"
    full = f"{100 * met.tokens:.3g} % of their tokens, {100 * met.squares:.3g} % of the squares of lengths"
    yield f"what came: {came}, {full}"
    alone = "" if met.by_squares else ", by tokens alone: the plan does not say what attention takes"
    yield f"predicted seconds are for that: the plan's x {met.passes:.3f}{alone}; predicted bytes are the plan's, the most"


def _reserve(report: Report) -> Iterator[str]:
    """How much was used of what the plan left alone, where a device tells."""
    outside = [row.measured.outside_bytes for row in report.stages if row.measured.outside_bytes is not None]
    slack = [row.measured.slack_bytes for row in report.stages if row.measured.slack_bytes is not None]
    if not outside or not slack:
        return
    planned = (None, None) if report.reserve is None else (report.reserve.outside_bytes, report.reserve.slack_bytes)
    others = f"{_used(max(outside), planned[0])} outside PyTorch's allocator (context, libraries, NCCL)"
    yield f"reserve: {others}, {_used(max(slack), planned[1])} reserved and not allocated"


def _used(found: int, planned: int | None) -> str:
    return format_bytes(found) if planned is None else f"{format_bytes(found)} of {format_bytes(planned)} used"


def _load(report: Report) -> Iterator[str]:
    """How many rows experts got, where there are experts."""
    most = max(report.stages, key=lambda row: row.measured.expert_load)
    if report.planned_load is None or not most.measured.expert_load:
        return
    found = f"experts: stage {most.stage} had a rank with {most.measured.expert_load:.2f} of a balanced share of tokens"
    planned = f"its plan was made for {report.planned_load:.2f}"
    more = ": expect more bytes and seconds than predicted" if most.measured.expert_load > report.planned_load else ""
    yield f"{found}, {planned}{more}"
    fallen = max(report.stages, key=lambda row: row.measured.fell_back)
    if fallen.measured.fell_back:
        often = f"{fallen.measured.fell_back} halves of a step fell back on stage {fallen.stage}"
        yield f"experts: {often}, whose bytes hold for less: plan for more with --experts-hold"


def _stages(stages: Sequence[int]) -> str:
    if len(stages) == 1:
        return f"stage {stages[0]}"
    together = list(stages) == list(range(stages[0], stages[-1] + 1))
    return f"stages {stages[0]}-{stages[-1]}" if together else f"stages {', '.join(map(str, stages))}"
