"""Tables of what was predicted and measured, in Markdown. Files of results can be read again: `--read FOLDER`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.one_gpu.results import AGAIN, NONE, Results

SECONDS = (
    "setting",
    "p",
    "m",
    "p/m",
    "of none: p",
    "m",
    "device: p",
    "busy",
    "issued",
    "recomputations: p",
    "m",
    "update: p",
    "m",
)
BYTES = (
    "setting",
    "states: p",
    "m",
    "peak: p",
    "m",
    "p/m",
    "beside states: p",
    "m",
    "p/m",
    "forward: p",
    "m",
    "reserved",
    "to host",
    "bits",
)

LEGEND = """\
Milliseconds of one step's forwards and backwards (p: predicted, m: measured, medians; without the reduction of gradients over one
rank, which is subtracted). *device*: predicted if Python took no time; *busy*: the union of all kernels. *issued*: when Python
had issued everything; it waits where the device's queue is full, so that it says something of steps that wait for Python alone.

GB (1e9) on the device. *states*: before a step; *peak*: in forwards and backwards; *beside states*: their difference; *forward*:
behind the first micro-batch's forward, its loss included. *bits*: whether losses and gradients of one step equal stock none's
in every bit, or which do not. Stock none is run again: where it differs from itself, other differences say nothing.
"""


def page(found: Sequence[Results]) -> str:
    return "\n".join(["# One GPU, real sizes", "", LEGEND, *(line for results in found for line in subject_lines(results))])


def subject_lines(results: Results) -> Iterator[str]:
    yield from (f"## {results.subject}: {results.shows}", "")
    if results.facts:
        facts = results.facts
        fusions = ", ".join(facts["fusions"]) or "none"
        yield f"{facts['machine']}. {facts['parameters'] / 1e9:.2f} billion parameters; fusions: {fusions}."
        yield ""
    for columns, cells in ((SECONDS, _seconds), (BYTES, _bytes)):
        yield "| " + " | ".join(columns) + " |"
        yield "|---" + "|--:" * (len(columns) - 1) + "|"
        for row in results.rows:
            if row["passes_s"] is not None:
                yield "| " + " | ".join([row["setting"], *cells(results, row)]) + " |"
        yield ""
    for row in results.rows:
        if row.get("error"):
            yield f"* {row['setting']}: {' '.join(row['error'].split())}"
    yield from (f"* {name}: not run, {reason}" for name, reason in results.not_run.items())
    yield ""


def _seconds(results: Results, row: Mapping[str, Any]) -> Iterator[str]:
    said, none = predicted_of(results, row), results.none
    measured_s = passes_s(row)
    yield _ms(said.get("passes_s"))
    yield _ms(measured_s)
    yield _ratio(said.get("passes_s"), measured_s)
    yield _ratio(said.get("passes_s"), results.predicted[NONE]["passes_s"])
    yield _ratio(measured_s, None if none is None else passes_s(none))
    yield _ms(said.get("device_s"))
    yield from (_ms(row[name]) for name in ("busy_s", "issued_s"))
    yield _ms(said.get("recompute_s") if row["recompute_s"] is not None else None)
    yield _ms(row["recompute_s"])
    yield _ms(said.get("update_s"))
    yield _ms(row["update_s"])


def _bytes(results: Results, row: Mapping[str, Any]) -> Iterator[str]:
    said = predicted_of(results, row)
    states = said.get("states_bytes", 0)
    moments = said.get("moments", {})
    beside = None if row["peak_bytes"] is None else row["peak_bytes"] - row["start_bytes"]
    yield _gb(states or None)
    yield _gb(row["start_bytes"])
    yield _gb(said.get("peak_bytes"))
    yield _gb(row["peak_bytes"])
    yield _ratio(said.get("peak_bytes"), row["peak_bytes"])
    yield _gb(said["peak_bytes"] - states if said else None)
    yield _gb(beside)
    yield _ratio(said["peak_bytes"] - states if said else None, beside)
    yield _gb(moments.get("forward"))
    yield _gb(row["forward_bytes"])
    yield _gb(row["reserved_bytes"])
    yield _gb(row["offloaded_bytes"] or None)
    yield _bits(row)


def passes_s(row: Mapping[str, Any]) -> float:
    """Without the reduction of gradients, which nobody predicts for one rank."""
    return float(row["passes_s"] - (row["reduce_s"] or 0.0))


def predicted_of(results: Results, row: Mapping[str, Any]) -> Mapping[str, Any]:
    return results.predicted.get(row["setting"].removeprefix(AGAIN), {})


def _bits(row: Mapping[str, Any]) -> str:
    if row["gradients_equal"] is None and row["losses_equal"] is None:
        return "not compared"
    if row["gradients_equal"]:
        return "equal"
    return f"{'losses equal, ' if row['losses_equal'] else ''}differ: {', '.join(row['differing'][:2])}"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.1f}"


def _gb(size: float | None) -> str:
    return "" if size is None else f"{size / 1e9:.2f}"


def _ratio(one: float | None, other: float | None) -> str:
    return "" if not one or not other else f"{one / other:.3f}"
