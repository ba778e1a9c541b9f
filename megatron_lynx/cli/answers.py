"""Prints answers as tables, and checks before a long computation that output files can be written."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from megatron_lynx.anatomy import HALVES
from megatron_lynx.cli.terminal import say, show, show_lines
from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.estimate import Estimate
from megatron_lynx.plan import Plan
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.published.left_out import LeftOut
from megatron_lynx.published.row import Row
from megatron_lynx.stock.rival import SimulatedRow
from megatron_lynx.tables import READABLE, WrappedTable
from megatron_lynx.timeline import write_trace
from megatron_lynx.units import GIB, format_bytes, format_seconds
from megatron_lynx.whole_file import against_file, against_folder, write_whole

if TYPE_CHECKING:
    from megatron_lynx.apply.releases import Held
    from megatron_lynx.doctor import Finding
    from megatron_lynx.testbed.comparison import Comparison


def write_comparison(comparison: Comparison, plan: Plan, folder: Path) -> list[Path]:
    from megatron_lynx.measure.measurement import save_measurement
    from megatron_lynx.report.contents import report
    from megatron_lynx.report.given import Given, ReadTrace

    measured, trace, drawn = folder / "measurement.json", folder / "trace.json", folder / "report.html"
    save_measurement(comparison.measurement, measured)
    write_trace(comparison.timeline, trace)
    given = Given((comparison.measurement.subject,), {"trace": os.fspath(trace)}, plan=plan, measurement=comparison.measurement)
    given.trace = ReadTrace(comparison.timeline, {}, simulated=False)
    write_whole(drawn, report(given, None, None))
    return [measured, trace, drawn]


def profile_in_words(measured: Profile, path: Path) -> str:
    parts = {half: measured.half(half) for half in HALVES} | (
        {} if (mixture := measured.experts) is None else {"experts": mixture}
    )
    halves = [
        f"{name:<10} forward {format_seconds(half.forward_s)}, backward {format_seconds(half.backward_s)}, "
        f"saves {format_bytes(half.saved_bytes)}"
        for name, half in parts.items()
    ]
    links = [f"{point.kind:<10} {format_bytes(point.bytes)} in {format_seconds(point.seconds)}" for point in measured.links]
    if mixture is not None and mixture.exchange_s:
        links.append(f"exchange   of experts' rows, four a layer, {format_seconds(mixture.exchange_s)}")
    rates = ", ".join(f"{kind} {rate / 1e9:.3g} GB/s" for kind, rate in measured.link_rates.items()) or "none of this job"
    links.append(f"links      measured: {rates}; {measured.source.interconnect}")
    on = measured.source.fusions
    fusions = [] if on is None else [f"fusions    {', '.join(on) or 'none'}"]
    return "\n".join([*halves, *links, *fusions, *_host_time(measured), f"wrote {path}"])


def _host_time(measured: Profile) -> list[str]:
    host_time, whose = measured.host_time, measured.shape.implementation
    if host_time is None:
        return ["host time  not known"]
    layer = host_time.of(whose)
    figures = f"stock none {format_seconds(layer.layer_s('none'))}, stock full {format_seconds(layer.layer_s('full'))}"
    keeps, recomputed = format_seconds(layer.layer_s("kept")), format_seconds(layer.layer_s("recomputed"))
    ours = f"a plan that keeps all {keeps}, recomputes all {recomputed}"
    lines = [f"host time  of a layer: {figures}; {ours} ({host_time.words_for(whose)})"]
    if (adam := host_time.adam) is not None:
        together = "" if adam.together_million_per_s is None else f", {adam.together_million_per_s:g} of each if all step"
        lines += [f"AdamW      on the host: {adam.alone_million_per_s:g} million parameters a second of a rank alone{together}"]
    return lines


def show_estimate(answer: Estimate) -> None:
    named = [memory.named for memory in answer.stages]
    parts = [part for part in named[0] if any(memory[part] for memory in named)]
    columns = ("stage", "moment", *(part.replace("in_hand", "transient").replace("_", " ") for part in parts))
    table = WrappedTable(columns, words=("moment",), keys=2, title="GiB of each device at its fullest moment")
    for stage, (memory, sizes) in enumerate(zip(answer.stages, named, strict=True)):
        table.add(str(stage), memory.moment.replace("_", " "), *(f"{sizes[part] / GIB:.2f}" for part in parts))
    if answer.of_launch:
        show_lines(answer.of_launch)
    show(table)
    show_lines(f"{answer.verdict} in {format_bytes(answer.job.memory_budget_bytes)}; offload ratio {answer.offload_ratio:g}")
    if reserve := answer.job.device_reserve.in_words:
        stated = answer.job.budget.memory_gib
        show_lines(reserve if stated is None else f"{reserve}; stated {stated:.2f}")
    if answer.between is not None:
        show_lines(answer.between.in_words)
    if answer.on_host is not None:
        show_lines(answer.on_host.in_words)
    tokens_per_s, mfu = answer.throughput.values()
    if answer.step is not None and tokens_per_s is not None and mfu is not None:
        parts_s = answer.step_parts_s or {}
        spent = ", ".join(f"{name.removesuffix('_s')} {format_seconds(value)}" for name, value in parts_s.items())
        show_lines(f"step {format_seconds(answer.step.most_s)}: {spent}")
        if not answer.step.is_known:
            overlap = "userbuffers" if answer.job.userbuffers else "overlapped exchanges"
            show_lines(f"{overlap} may hide more than that: step {format_seconds(answer.step.least_s)} at best")
        peak = f" of the {answer.job.model.dtype} peak" if answer.job.model.fp8 is not None else ""
        show_lines(f"{tokens_per_s:.0f} tokens/s, MFU {mfu:.1%}{peak} (causal attention counted half)")
    if answer.host is not None:
        show_lines(*answer.host.lines)
    if answer.job.schedule == "double_buffered":
        show_lines("without flushes: gradients are one update old, which changes what is learnt from step to step")


def show_published(rows: list[Row]) -> None:
    columns = ("source", "row", "published", "computed", "error", "bound", "calibrates")
    table = WrappedTable(columns, words=("source", "row", "calibrates"), keys=2)
    for row in rows:
        unit = "%" if row.error_in == "percent" else ""
        bound = "" if row.bound is None else f"{row.bound:g}{unit}"
        figures = (f"{row.published:.6g}", f"{row.computed:.6g}", f"{row.error:+.3g}{unit}", bound, row.calibrates or "")
        table.add(row.source, row.what, *figures, style="bold red" if row.within is False else "")
    show(table)


def show_left_out(answer: LeftOut) -> None:
    columns = ("series", "steps", "catalogue", "left out", "bias", "ratios", "wrong order")
    table = WrappedTable(columns, words=("series",), title="mean errors in percent; left out: constants fitted to other series")
    for name, family, grade, errors in answer.by_series:
        label = f"{name} ({grade}, {family})"
        ratios = "" if errors.ratio_error is None else f"{errors.ratio_error:.1f} of {errors.ratios}"
        wrong = str(errors.reversed) if errors.ratios else ""
        figures = (f"{errors.catalogued:.1f}", f"{errors.left_out:.1f}", f"{errors.bias:+.1f}", ratios, wrong)
        table.add(label, str(errors.steps), *figures)
    show(table)
    show_lines(*answer.in_words)


def show_simulated(rows: list[SimulatedRow]) -> None:
    columns = ("setting", "step", "ratio to none", "fullest device", "on the host")
    table = WrappedTable(columns, words=("setting",), title="one step, the optimizer's update included, simulated")
    for row in rows:
        host = format_bytes(row.host_bytes) if row.host_bytes else "-"
        figures = (row.step.in_words, f"{row.ratio_to_none:.3f}", format_bytes(row.device_bytes), host)
        table.add(row.setting, *figures, style="bold" if row.ours else "")
    show(table)


def show_held(held: list[Held], summary: str) -> None:
    columns = ("hook", "site", "release", "as recorded")
    table = WrappedTable(columns, words=columns)
    for row in held:
        style = "" if row.as_recorded else "bold red"
        table.add(row.hook, row.site, row.release, "yes" if row.as_recorded else "NO", style=style)
    show(table)
    say(summary)


def show_findings(findings: list[Finding]) -> None:
    styles = {"defeats": "bold red", "slows": "yellow"}
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(max_width=READABLE)
    for finding in findings:
        paragraphs = [f"{finding.topic}: {finding.state}", finding.costs, f"to do: {finding.todo}" if finding.todo else ""]
        table.add_row(finding.level, Text("\n".join(filter(None, paragraphs))), style=styles.get(finding.level, ""))
    show(table)


def check_writable(*files: Path | None, read: Iterable[Path | None] = ()) -> None:
    """Raise `ConfigError` with all files that cannot be written, or that are also `read`."""
    problems: list[Problem] = []
    taken = {os.path.realpath(file) for file in read if file is not None}
    for file in files:
        if file is None or (os.path.exists(file) and not os.path.isfile(file) and not os.path.isdir(file)):
            continue  # opening a device or a pipe may have an effect
        if os.path.realpath(file) in taken:
            problems.append(Problem(os.fspath(file), "a file that is read", "another place for the answer"))
        elif (obstacle := against_file(file)) is not None:
            problems.append(Problem(os.fspath(file), obstacle, "a file that can be written"))
    if problems:
        raise ConfigError("the answer could not be written", problems)


def make_folder(folder: Path) -> None:
    if (obstacle := against_folder(folder)) is not None:
        raise ConfigError(f"{folder} cannot be used", [Problem(os.fspath(folder), obstacle, "a folder that can be written")])
