"""The command `megatron-lynx`. What each command does is elsewhere; here is how it is asked and how it answers.

    arguments ─> one small function ─> its machinery, imported inside ─> stdout: tables, or JSON with --json
                        └─ LynxError ─> stderr: every problem                exit 1: the answer is no, 2: the request is wrong

No import at the top but the command line's own: `--help` must not wait for torch.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from megatron_lynx.errors import LynxError
from megatron_lynx.version import __version__

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from megatron_lynx.apply.inventory import Held
    from megatron_lynx.config import Job
    from megatron_lynx.doctor import Finding
    from megatron_lynx.estimate import Estimate
    from megatron_lynx.launch_arguments import Reading
    from megatron_lynx.plan import Plan
    from megatron_lynx.profiler.profile import Profile
    from megatron_lynx.published.row import Row
    from megatron_lynx.simulator.simulation import Simulation
    from megatron_lynx.testbed.comparison import Comparison
    from megatron_lynx.testbed.place import Place

WIDTH_OF_FILES = 180
"""Columns of a table that goes to a file or a pipe, where nobody says how wide the page is."""

PATIENCE_S = 2.0
"""Before a progress bar."""


class ErrorBoundary(TyperGroup):
    """Every error of this package ends a command here: its problems on stderr, its exit status, no traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except LynxError as error:
            _show_error(error)
            raise typer.Exit(error.exit_status) from None


app = typer.Typer(cls=ErrorBoundary, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.", show_default=False)]
JobName = Annotated[str, typer.Argument(metavar="JOB", help="A job file, or a bundled one: jobs/demo.", show_default=False)]
JobOrLaunch = Annotated[
    list[str],
    typer.Argument(
        metavar="JOB | --cluster C -- LAUNCH",
        help="A job file, or a bundled one: jobs/demo. With --cluster: a Megatron launch, as in `-- torchrun ... pretrain_gpt.py "
        "--num-layers 32 ...`, or its arguments alone.",
        show_default=False,
    ),
]
ClusterOption = Annotated[
    str | None, typer.Option("--cluster", metavar="CLUSTER", help="Where the launch is to run: a100-80g, or a file.")
]
GpusOption = Annotated[
    int | None, typer.Option("--gpus", metavar="N", min=1, help="GPUs of the launch, where its launcher does not say.")
]
ProfileOption = Annotated[
    Path | None, typer.Option("--profile", metavar="PROFILE", help="A profile of the job; without one, it is measured.")
]
LayersOption = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        metavar="PROFILE",
        help="Measured layers. Without: the cluster's figures, or, where it has none, measured here.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON, for programs.")]


def _finite(figure: float | None) -> float | None:
    if figure is not None and not 0 < figure < float("inf"):
        raise typer.BadParameter(f"found {figure}, needed a number above 0")
    return figure


MemoryOption = Annotated[
    float | None,
    typer.Option("--memory-gib", callback=_finite, metavar="GIB", help="Of each device. Without: the job's, else the cluster's."),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def megatron_lynx(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Overlapped recomputation for Megatron-LM: activation memory made cheap."""


@app.command()
def explain(plan_file: PlanFile, as_json: AsJson = False) -> None:
    """What a plan does, stage by stage: kept, replayed, where, and what is expected of it."""
    from megatron_lynx.plan import load_plan
    from megatron_lynx.plan.explanation import explanation

    plan = load_plan(plan_file)
    if as_json:
        _print_json(plan.model_dump(mode="json", exclude_none=True))
    else:
        _print(explanation(plan))


@app.command()
def profile(
    job_file: JobName,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="PROFILE", help="Where to write it.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Measure what a job's layers and links cost on this machine."""
    from megatron_lynx.profiler.profile import save_profile

    job = _job(job_file)
    _make_folder(output.parent)
    with _place(job) as place:
        measured = _measured(job, place)
    save_profile(measured, output)
    if as_json:
        _print_json(measured.model_dump(mode="json"))
    else:
        _print(_profile_in_words(measured, output))


@app.command()
def plan(
    asked: JobOrLaunch,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="PLAN", help="Where to write it.", show_default=False)],
    cluster: ClusterOption = None,
    gpus: GpusOption = None,
    memory_gib: MemoryOption = None,
    profile_file: LayersOption = None,
    as_json: AsJson = False,
) -> None:
    """The best plan for a job, or for a Megatron launch, and the flags that its launch needs."""
    from megatron_lynx.plan import save_plan
    from megatron_lynx.plan.explanation import explanation
    from megatron_lynx.planner import decide
    from megatron_lynx.planner.summary import job_flags, summary

    changes = {} if memory_gib is None else {"budget.memory_gib": memory_gib}
    job, reading = _job_or_launch(asked, cluster, gpus, planning=True, quiet=as_json, changes=changes)
    _make_folder(output.parent)
    costs = _costs(job, profile_file)
    decision = decide(job, costs)
    save_plan(decision.plan, output)
    if as_json:
        _print_json({"plan": os.fspath(output), **summary(decision, costs), **_understood(reading)})
        return
    _print(explanation(decision.plan))
    if reading is None:
        typer.echo(f"wrote {output}; its launch needs the flags above, and {' '.join(job_flags(job))}")
    else:
        typer.echo(f"wrote {output}; launch with it:\n\n{_command_with(reading, job, decision.plan, output)}")


@app.command()
def simulate(
    plan_file: PlanFile,
    profile_file: Annotated[
        Path | None, typer.Option("--profile", metavar="PROFILE", help="A profile of the plan's job.", show_default=False)
    ] = None,
    job_file: Annotated[
        str | None,
        typer.Option("--job", metavar="JOB", help="The plan's job: its cluster's figures are taken where there is no profile."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="PNG", help="Write a picture: stages over time, memory below.")
    ] = None,
    trace: Annotated[Path | None, typer.Option("--trace", metavar="JSON", help="Write a trace, for ui.perfetto.dev.")] = None,
    budget_mib: Annotated[
        float | None,
        typer.Option("--budget-mib", callback=_finite, metavar="MIB", help="The budget, drawn beside the memory."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """One step under a plan, without running it: timeline, bubbles, exposed replays, memory of every stage."""
    from megatron_lynx.plan import load_plan
    from megatron_lynx.rehearsal import rehearse
    from megatron_lynx.simulator import figures

    for path in (plot, trace):
        if path is not None:
            _make_folder(path.parent)
    simulation = rehearse(load_plan(plan_file), _figures(profile_file, job_file))
    written = _write_simulation(simulation, plan_file, plot, trace, budget_mib)
    if as_json:
        _print_json(figures.as_json(simulation))
    else:
        _print(figures.table(simulation))
        for path in written:
            typer.echo(f"wrote {path}")


@app.command()
def compare(
    job_file: JobName,
    plan_file: Annotated[Path | None, typer.Option("--plan", metavar="PLAN", help="The plan; without one, it is made.")] = None,
    profile_file: ProfileOption = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Timed steps of each setting.")] = 5,
    warmups: Annotated[int, typer.Option("--steps-warmup", min=0, help="Steps of each setting before those.")] = 1,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="Where the reports go.")] = Path(
        "build/compare"
    ),
    as_json: AsJson = False,
) -> None:
    """Train a job under stock Megatron's settings and under a plan, side by side, on this machine."""
    from megatron_lynx.compare.report import print_report
    from megatron_lynx.compare.table import as_json as rows_as_json
    from megatron_lynx.compare.table import rows_of
    from megatron_lynx.planner import partitioned_as
    from megatron_lynx.testbed.comparison import compare as run

    job = _job(job_file)
    _make_folder(output)
    with _place(job) as place:
        made = _plan_for(job, place, plan_file, profile_file, output)
        comparison = run(partitioned_as(job, made), made, place, _announced, rounds=rounds, warmups=warmups)
    written = _write_comparison(comparison, output)
    if as_json:
        _print_json(rows_as_json(rows_of(comparison.measurement)))
    else:
        print_report(comparison.measurement, _console())
        typer.echo("\n".join(f"wrote {path}" for path in written))
    if not comparison.gradients_equal:
        typer.echo("gradients under the plan differ from stock Megatron's", err=True)
        raise typer.Exit(1)


@app.command()
def estimate(
    asked: JobOrLaunch,
    cluster: ClusterOption = None,
    gpus: GpusOption = None,
    memory_gib: MemoryOption = None,
    profile_file: Annotated[
        Path | None, typer.Option("--profile", metavar="PROFILE", help="Measured layers; without, the cluster's figures.")
    ] = None,
    offload_ratio: Annotated[
        str | None, typer.Option("--offload-ratio", metavar="RATIO", help="Instead of the job's: in [0, 1], or auto.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Memory and time of a job, or of a Megatron launch, under the policy and offload ratio it states. Measures nothing."""
    from megatron_lynx.estimate import estimate as estimated
    from megatron_lynx.profiler.profile import load_profile

    changes = {} if offload_ratio is None else {"offload_ratio": _number_or_word(offload_ratio)}
    changes |= {} if memory_gib is None else {"budget.memory_gib": memory_gib}
    job, reading = _job_or_launch(asked, cluster, gpus, planning=False, quiet=as_json, changes=changes)
    answer = estimated(job, None if profile_file is None else load_profile(profile_file))
    if as_json:
        _print_json({**answer.as_json, **_understood(reading)})
    else:
        _print_estimate(answer)
    if not answer.fits:
        typer.echo("\n".join(["this job does not fit", *(f"  - {problem}" for problem in answer.shortages)]), err=True)
        raise typer.Exit(1)


@app.command()
def search(
    words: JobOrLaunch,
    gpus: Annotated[int, typer.Option("--gpus", metavar="N", help="Devices to spread the job over.", show_default=False)],
    cluster: ClusterOption = None,
    top: Annotated[int, typer.Option("--top", metavar="K", help="How many layouts to show.")] = 10,
    policies: Annotated[
        str | None, typer.Option("--policies", metavar="A,B", help="Policies to try; without, every one.", show_default=False)
    ] = None,
    offload: Annotated[
        bool, typer.Option("--offload/--no-offload", help="Whether activations may go to host memory, no more than needed.")
    ] = True,
    across_nodes: Annotated[bool, typer.Option("--tensor-across-nodes", help="Let tensor-parallel groups span nodes.")] = False,
    as_json: AsJson = False,
) -> None:
    """The fastest layouts of a job or a launch. Its layout, micro-batch size, policy, offload ratio, devices do not matter."""
    from megatron_lynx.launch_arguments.command_line import command_line
    from megatron_lynx.search import POLICIES
    from megatron_lynx.search import search as searched
    from megatron_lynx.search.table import table

    asked = POLICIES if policies is None else [name.strip() for name in policies.split(",") if name.strip()]
    own_gpus = None if cluster is None or command_line(words).gpus else gpus
    job, _ = _job_or_launch(words, cluster, own_gpus, planning=False, quiet=as_json)
    with _counted("layouts ranked") as watch:
        ranking = searched(job, gpus, top=top, policies=asked, offload=offload, across_nodes=across_nodes, watch=watch)
    if as_json:
        _print_json(ranking.as_json)
    else:
        _print(table(ranking))
        typer.echo(f"{ranking.considered} candidates in {ranking.seconds:.2f} s")


@app.command()
def validate(as_json: AsJson = False) -> None:
    """Recompute published results, and print how far off each is."""
    from megatron_lynx.published.tables import all_rows

    rows = all_rows()
    missed = [row for row in rows if row.within is False]
    if as_json:
        _print_json({"rows": [row.as_json for row in rows]})
    else:
        _print_published(rows)
    typer.echo(f"{len(rows)} rows, {len(missed)} outside their bound", err=True)
    if missed:
        raise typer.Exit(1)


@app.command()
def hooks(as_json: AsJson = False) -> None:
    """What is held of the megatron-core that is installed, and whether it is as recorded. Needs no model."""
    with _announced("reading megatron-core"):
        _quieten_megatron()
        from megatron_lynx.apply.inventory import inventory
        from megatron_lynx.apply.releases import installed_version, present_release

        held = list(inventory(present_release()))
    stale = sum(not each.as_recorded for each in held)
    if as_json:
        rows = [{"hook": each.hook, "site": each.site, "release": each.release, "as_recorded": each.as_recorded} for each in held]
        _print_json({"megatron_core": installed_version(), "hooks": rows})
    else:
        _print_held(held, f"megatron-core {installed_version()}: {len(held)} functions relied on, {stale} not as recorded")
    if stale:
        raise typer.Exit(1)


@app.command()
def doctor(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[-- LAUNCH]", help="A Megatron launch to look at, too.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What here, or in a launch, defeats overlap: what was found, what it costs, what to set. Needs no GPU."""
    from dataclasses import asdict

    from megatron_lynx.doctor import findings

    with _announced("looking around"):
        _quieten_megatron()
        found = list(findings(words or ()))
    if as_json:
        _print_json({"findings": [asdict(finding) for finding in found]})
    else:
        _print_findings(found)
    if any(finding.level == "defeats" for finding in found):
        raise typer.Exit(1)


def main() -> None:
    """The console script."""
    app(prog_name="megatron-lynx")


def _job(name: str, changes: Mapping[str, Any] | None = None) -> Job:
    from megatron_lynx.config import load_job

    return load_job(name, changes)


def _job_or_launch(
    words: list[str],
    cluster: str | None,
    gpus: int | None,
    *,
    planning: bool,
    quiet: bool,
    changes: Mapping[str, Any] | None = None,
) -> tuple[Job, Reading | None]:
    """The job that was asked about. Of a launch: and what was understood of it, which is shown before anything is refused."""
    from megatron_lynx.errors import ConfigError, Problem
    from megatron_lynx.launch_arguments import job_of, read_launch
    from megatron_lynx.launch_arguments.table import remarks, understood

    if cluster is None:
        problems = [Problem(word, "a second job", "one job, or --cluster C before a launch") for word in words[1:2]]
        problems += [] if gpus is None else [Problem("--gpus", str(gpus), "a launch: with a job file, its own figure counts")]
        if problems:
            raise ConfigError("it is not clear what is asked", problems)
        return _job(words[0], changes), None
    reading = read_launch(words, gpus=gpus, planning=planning)
    if not quiet:
        _print(understood(reading))
        typer.echo("\n".join(remarks(reading)))
    return job_of(reading, cluster, changes or {}), reading


def _understood(reading: Reading | None) -> dict[str, object]:
    from megatron_lynx.launch_arguments.table import as_json

    return {} if reading is None else {"understood": as_json(reading)}


def _command_with(reading: Reading, job: Job, made: Plan, path: Path) -> str:
    """The launch under the plan. Only where the launch left the layers' places open has the plan decided them."""
    from megatron_lynx.launch_arguments.paste import to_paste
    from megatron_lynx.plan.layout import layer_flags

    return to_paste(reading.command, os.fspath(path), layer_flags(made) if job.parallel.partition == "auto" else ())


def _number_or_word(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _costs(job: Job, profile_file: Path | None) -> Profile:
    """Seconds and bytes of a job's layers and links. A described cluster gives the links, whoever measured the layers."""
    from megatron_lynx.profiler.analytic import analytic_profile, on_cluster
    from megatron_lynx.profiler.profile import load_profile

    described = job.cluster.matmul is not None
    if profile_file is not None:
        given = load_profile(profile_file)
        return on_cluster(given, job) if described else given
    if described:
        typer.echo(f"nothing is measured: seconds are from the figures of {job.cluster.name}", err=True)
        return analytic_profile(job)
    with _place(job) as place:
        return _measured(job, place)


def _figures(profile_file: Path | None, job_file: str | None) -> Profile:
    """As `_costs`, for a plan: nothing is measured, and a profile needs no job."""
    from megatron_lynx.errors import ConfigError, Problem
    from megatron_lynx.profiler.profile import load_profile

    job = None if job_file is None else _job(job_file)
    if job is not None and (job.cluster.matmul is not None or profile_file is not None):
        return _costs(job, profile_file)
    if profile_file is not None:
        return load_profile(profile_file)
    needed = "a profile of the plan's job, or --job, whose cluster has figures"
    raise ConfigError("there are no figures to simulate with", [Problem("--profile", "none", needed)])


@contextmanager
def _place(job: Job) -> Iterator[Place]:
    from megatron_lynx.testbed.place import place_for

    with place_for(job) as place:
        typer.echo(f"{place.ranks} {'rank' if place.ranks == 1 else 'ranks'} on this machine: {place.description}", err=True)
        yield place


def _measured(job: Job, place: Place) -> Profile:
    from megatron_lynx.testbed.profiling import measure_profile

    return measure_profile(job, place, _announced)


def _plan_for(job: Job, place: Place, plan_file: Path | None, profile_file: Path | None, folder: Path) -> Plan:
    """The given plan, or one made here and kept beside the reports."""
    from megatron_lynx.plan import load_plan, save_plan
    from megatron_lynx.planner import make_plan
    from megatron_lynx.profiler.profile import load_profile, save_profile

    if plan_file is not None:
        return load_plan(plan_file)
    costs = load_profile(profile_file) if profile_file is not None else _measured(job, place)
    save_profile(costs, folder / "profile.yaml")
    made = make_plan(job, costs)
    save_plan(made, folder / "plan.yaml")
    return made


def _write_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    from megatron_lynx.compare.perfetto import write_trace
    from megatron_lynx.compare.report import write_report
    from megatron_lynx.compare.timeline_plot import plot_timeline

    picture, trace = folder / "timeline.png", folder / "trace.json"
    plot_timeline(comparison.timeline, picture, f"One step under the plan: {comparison.measurement.subject}")
    write_trace(comparison.timeline, trace)
    return [*write_report(comparison.measurement, folder, picture.name), trace, picture]


def _write_simulation(
    simulation: Simulation, plan_file: Path, plot: Path | None, trace: Path | None, budget_mib: float | None
) -> list[Path]:
    from megatron_lynx.simulator.figures import note
    from megatron_lynx.units import MIB, format_seconds

    stages = range(len(simulation.executed))
    timeline, memory = simulation.timeline(), {stage: simulation.memory(stage) for stage in stages}
    if plot is not None:
        from megatron_lynx.compare.simulation_plot import Shown, plot_simulation

        notes = {stage: note(simulation, stage) for stage in stages}
        shown = Shown(timeline, memory, notes, None if budget_mib is None else budget_mib * MIB)
        plot_simulation(shown, plot, f"One step under {plan_file.name}, simulated: {format_seconds(simulation.step_s)}")
    if trace is not None:
        from megatron_lynx.compare.perfetto import write_trace

        write_trace(timeline, trace, "stage", memory)
    return [path for path in (plot, trace) if path is not None]


def _profile_in_words(measured: Profile, path: Path) -> str:
    from megatron_lynx.units import format_bytes, format_seconds

    halves = [
        f"{name:<10} forward {format_seconds(half.forward_s)}, backward {format_seconds(half.backward_s)}, "
        f"saves {format_bytes(half.saved_bytes)}"
        for name, half in (("attention", measured.attention), ("mlp", measured.mlp))
    ]
    links = [f"{point.kind:<10} {format_bytes(point.bytes)} in {format_seconds(point.seconds)}" for point in measured.links]
    return "\n".join([*halves, *links, f"wrote {path}"])


def _print_estimate(answer: Estimate) -> None:
    """Stages down, parts across, in GiB; parts that no stage has are left out."""
    from dataclasses import asdict

    from rich.table import Table

    from megatron_lynx.units import GIB, format_bytes, format_seconds

    named = [memory.named for memory in answer.stages]
    parts = [part for part in named[0] if any(memory[part] for memory in named)]
    table = Table(header_style="bold", title="GiB of each device")
    for column in ("stage", *parts):
        table.add_column(column, justify="right")
    for stage, memory in enumerate(named):
        table.add_row(str(stage), *(f"{memory[part] / GIB:.2f}" for part in parts))
    _print(table)
    verdict = "fits" if answer.fits else "does not fit"
    typer.echo(f"{verdict} in {format_bytes(answer.budget_bytes)}; offload ratio {answer.offload_ratio:g}")
    if answer.step is not None and answer.tokens_per_s is not None and answer.mfu is not None:
        spent = ", ".join(f"{name.removesuffix('_s')} {format_seconds(value)}" for name, value in asdict(answer.step).items())
        typer.echo(f"step {format_seconds(answer.step.total_s)}: {spent}")
        typer.echo(f"{answer.tokens_per_s:.0f} tokens/s, MFU {answer.mfu:.1%} (causal attention counted half)")


def _print_published(rows: list[Row]) -> None:
    from rich.table import Table

    table = Table(header_style="bold")
    for column in ("source", "row", "published", "computed", "error", "bound", "calibrates"):
        table.add_column(column, justify="left" if column in ("source", "row", "calibrates") else "right", overflow="fold")
    for row in rows:
        unit = "%" if row.error_in == "percent" else ""
        bound = "" if row.bound is None else f"{row.bound:g}{unit}"
        figures = (f"{row.published:.6g}", f"{row.computed:.6g}", f"{row.error:+.3g}{unit}", bound, row.calibrates or "")
        table.add_row(row.source, row.what, *figures, style="bold red" if row.within is False else "")
    _print(table)


def _print_held(held: list[Held], summary: str) -> None:
    from rich.table import Table

    table = Table(header_style="bold")
    for column in ("hook", "site", "release", "as recorded"):
        table.add_column(column, overflow="fold")
    for each in held:
        style = "" if each.as_recorded else "bold red"
        table.add_row(each.hook, each.site, each.release, "yes" if each.as_recorded else "NO", style=style)
    _print(table)
    typer.echo(summary)


def _print_findings(found: list[Finding]) -> None:
    from rich.table import Table

    table = Table(header_style="bold")
    for column in ("", "what", "found", "costs", "to do"):
        table.add_column(column, overflow="fold")
    styles = {"defeats": "bold red", "slows": "yellow"}
    for finding in found:
        row = (finding.level, finding.topic, finding.found, finding.costs, finding.todo)
        table.add_row(*row, style=styles.get(finding.level, ""))
    _print(table)


@contextmanager
def _announced(what: str) -> Iterator[None]:
    """Say on stderr what takes long, while it does."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console.print(f"{what} ...", soft_wrap=True)
        yield
        return
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(what, total=None)
        yield
        progress.update(task, total=1, completed=1)


@contextmanager
def _counted(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr for what takes longer than people wait gladly; none where nobody is looking."""
    import time

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress, began_s = Progress(*columns, console=console, transient=True), time.monotonic()
    task = progress.add_task(what)

    def watch(done: int, total: int) -> None:
        if not progress.live.is_started and time.monotonic() - began_s > PATIENCE_S:
            progress.start()
        progress.update(task, completed=done, total=total)

    try:
        yield watch
    finally:
        progress.stop()


def _quieten_megatron() -> None:
    """That Apex and Transformer Engine are missing is Megatron's to know. No compilation: its import must not start one."""
    import warnings

    warnings.filterwarnings("ignore", module=r"megatron\.core|torch")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def _make_folder(folder: Path) -> None:
    """Before anything takes long: whether the answer can be written."""
    from megatron_lynx.errors import ConfigError, Problem

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = Problem(os.fspath(folder), str(error.strerror or error).lower(), "a folder that can be written")
        raise ConfigError(f"{folder} cannot be used", [problem]) from None


def _print_json(answer: Any) -> None:
    typer.echo(json.dumps(answer, indent=2))


def _print(answer: RenderableType) -> None:
    _console().print(answer)


def _console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDTH_OF_FILES)


def _show_error(error: LynxError) -> None:
    """The headline, then a line per problem. Paths and names are printed as they are, never taken for markup."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(Text(error.headline, style="bold red"))
    for problem in error.problems:
        console.print(Text("  - ").append(str(problem)))


if __name__ == "__main__":
    main()
