"""Reports a comparison on the terminal and in JSON, with a verdict and notes on the measurement.

Opponents of a plan are the stock settings of at most its bytes; the fastest of them counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from rich.console import Console

from megatron_lynx.measure.measurement import Measurement, Setting
from megatron_lynx.tables import WrappedTable
from megatron_lynx.units import format_bytes, format_seconds, speed_in_words

Bytes = Literal["resident_bytes", "peak_bytes"]

IN_WORDS: dict[Bytes, str] = {"resident_bytes": "activation bytes", "peak_bytes": "peak bytes"}

SHOWN = ("peak_bytes", "on_demand_s", "offloaded_bytes", "host_bytes", "exposed_copy_s")
"""Figures of a setting in JSON under their own names."""


def as_json(measurement: Measurement) -> dict[str, Any]:
    return {"rows": [_row(measurement, setting) for setting in measurement.settings]}


def _row(measurement: Measurement, setting: Setting) -> dict[str, Any]:
    figures = setting.figures
    return {
        "setting": setting.name,
        "step_s": setting.step.median_s,
        "ratio_to_none": measurement.ratio_to_none(setting),
        "activation_bytes": figures.resident_bytes,
        "exposed_s": measurement.exposed_s(setting),
        **{name: getattr(figures, name) for name in SHOWN},
        "gradients_equal": setting.gradients_equal,
    }


def verdict(settings: Iterable[Setting], by: Bytes = "resident_bytes") -> str | None:
    """Our fastest setting against the fastest stock one with at most its bytes; None if one of them was not measured."""
    settings = tuple(settings)
    ours = min((setting for setting in settings if setting.ours), key=_step_s, default=None)
    stock = [setting for setting in settings if not setting.ours]
    if ours is None or not stock:
        return None
    small = (setting for setting in stock if getattr(setting.figures, by) <= getattr(ours.figures, by))
    if (opponent := min(small, key=_step_s, default=None)) is None:
        return f"No stock setting that was measured needs as few {IN_WORDS[by]} as {_in_words(ours, by)}."
    won = f"is {speed_in_words(_step_s(ours), _step_s(opponent))}"
    opposed = f"{_in_words(opponent, by)}, the fastest stock setting of no more {IN_WORDS[by]}"
    return f"{_in_words(ours, by)} {won} {opposed}."


def _step_s(setting: Setting) -> float:
    return setting.step.median_s


def _in_words(setting: Setting, by: Bytes) -> str:
    return f"{setting.name} ({format_seconds(_step_s(setting))}, {format_bytes(getattr(setting.figures, by))})"


COLUMNS = (
    "setting",
    "step",
    "quartiles",
    "ratio to none",
    "resident",
    "peak",
    "exposed",
    "recomputations hidden / on demand",
    "gradients equal",
)

HOW_BYTES = {
    "cpu": "what PyTorch's CPU allocator reports through the profiler, exact to the byte",
    "cuda": "torch.cuda.memory_allocated and max_memory_allocated, blocks of the caching allocator",
}


def print_report(measurement: Measurement, console: Console) -> None:
    table = WrappedTable(COLUMNS, words=COLUMNS[:1], title=measurement.subject)
    for setting in measurement.settings:
        table.add(*_cells(measurement, setting), style="bold green" if setting.ours else "")
    console.print(table)
    for sentence in verdicts(measurement):
        console.print(sentence, style="bold", highlight=False)
    for note in notes(measurement):
        console.print(f"  {note}", style="dim", highlight=False)


def verdicts(measurement: Measurement) -> list[str]:
    sentences = (verdict(measurement.settings, "resident_bytes"), verdict(measurement.settings, "peak_bytes"))
    return [sentence for sentence in sentences if sentence is not None]


def notes(measurement: Measurement) -> Iterator[str]:
    yield f"Machine: {measurement.machine}."
    yield (
        f"Times: settings took turns, {measurement.rounds} timed rounds after {measurement.warmups} of warm-up; "
        "a sample is the slowest rank's step; step is their median."
    )
    yield (
        f"Bytes: {HOW_BYTES[measurement.device]}, above the level at the step's start, in a step that was not timed, "
        "the same for all settings; resident is the most at the end of a forward pass, peak the most at any moment; "
        "the rank that needs most."
    )
    yield f"Exposed: step - step({measurement.reference.name}), medians; recomputations: of all ranks in one step."
    for setting in measurement.settings:
        figures = setting.figures
        if figures.on_demand_s:
            yield f"{setting.name}: {format_seconds(figures.on_demand_s)} of one step's trace are recomputations on demand."
        if deferred := figures.filled + figures.flushed:
            yield (
                f"{setting.name}: {deferred} weight gradients deferred in one step on all ranks, "
                f"{figures.filled} of them into waits; their operands held at most {format_bytes(figures.deferred_bytes)}."
            )
        if figures.offloaded_bytes:
            yield (
                f"{setting.name}: {format_bytes(figures.offloaded_bytes)} to the host and back in one step, through "
                f"{format_bytes(figures.host_bytes)} of host memory; compute waited {format_seconds(figures.exposed_copy_s)} for "
                "copies; the rank that needs most of each."
            )
    if len(measurement.skipped) > 1:
        yield f"Not run: {len(measurement.skipped)} settings; measurement.json has each one's reason."
    else:
        yield from (f"Not run: {skipped.name}: {skipped.reason}." for skipped in measurement.skipped)


def _cells(measurement: Measurement, setting: Setting) -> tuple[str, ...]:
    reference, step, exposed_s = setting is measurement.reference, setting.step, measurement.exposed_s(setting)
    figures = setting.figures
    equal = {True: "yes", False: "NO", None: "reference" if reference else "not compared"}[setting.gradients_equal]
    return (
        setting.name,
        format_seconds(step.median_s),
        f"{format_seconds(step.lower_s)} - {format_seconds(step.upper_s)}",
        f"{measurement.ratio_to_none(setting):.3f}",
        format_bytes(figures.resident_bytes),
        format_bytes(figures.peak_bytes),
        "-" if reference else f"{'-' if exposed_s < 0 else '+'}{format_seconds(abs(exposed_s))}",
        f"{figures.in_windows} / {figures.on_demand}" if figures.recomputed else "-",
        equal,
    )
