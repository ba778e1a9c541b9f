"""Commands that make plans and show them: profile, plan, explain, simulate."""

from __future__ import annotations

import os
import shlex
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from typer.core import TyperGroup
from typer.main import get_command

from megatron_lynx.cli.advising import show_answer, show_details
from megatron_lynx.cli.answers import check_writable, profile_in_words
from megatron_lynx.cli.app import app
from megatron_lynx.cli.inputs import figures_for, hosts_of, job_named, job_path, lengths_of, measured_here, number_or_word, taught
from megatron_lynx.cli.launches import Asked, asked_about, command_with, job_or_launch, understood_as_json
from megatron_lynx.cli.options import (
    AsJson,
    BridgeOption,
    ClusterOption,
    FromRunOption,
    GpusOption,
    HoldOption,
    HostMemoryOption,
    Inexact,
    InexactOption,
    JobName,
    JobOrLaunch,
    LaunchFileOption,
    LayersOption,
    LengthsOption,
    LoadOption,
    MemoryOption,
    ModelOption,
    OffloadOption,
    OptimizerOption,
    PlanFile,
    ShareOption,
    StrictOption,
    VerboseOption,
    budget_changes,
    expert_changes,
)
from megatron_lynx.cli.terminal import in_progress, say, show, show_json, show_lines

if TYPE_CHECKING:
    from megatron_lynx.advise import Answer
    from megatron_lynx.config import Job
    from megatron_lynx.launch_arguments import Reading
    from megatron_lynx.plan import Plan
    from megatron_lynx.profiler.profile import Profile


@app.command()
def profile(
    job_file: JobName,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="PROFILE", help="Where to write it.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Measure a job's layers and links on this machine."""
    from megatron_lynx.profiler.profile import save_profile

    job = job_named(job_file)
    check_writable(output, read=[job_path(job_file)])
    with hosts_of(job) as hosts:
        measured = measured_here(job, hosts)
    save_profile(measured, output)
    if as_json:
        show_json(measured.model_dump(mode="json"))
    else:
        show(profile_in_words(measured, output))


@app.command()
def plan(
    context: typer.Context,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="PLAN", help="Where to write it.", show_default=False)],
    words: JobOrLaunch = None,
    cluster: ClusterOption = None,
    gpus: GpusOption = None,
    bridge: BridgeOption = None,
    model: ModelOption = None,
    launch_file: LaunchFileOption = None,
    strict: StrictOption = False,
    memory_gib: MemoryOption = None,
    share: ShareOption = None,
    host_memory_gib: HostMemoryOption = None,
    offload_ratio: OffloadOption = None,
    optimizer_offload: OptimizerOption = None,
    load: LoadOption = None,
    hold: HoldOption = None,
    lengths: LengthsOption = None,
    inexact: InexactOption = None,
    profile_file: LayersOption = None,
    run_file: FromRunOption = None,
    verbose: VerboseOption = False,
    as_json: AsJson = False,
) -> None:
    """Make the best plan for a job or a Megatron launch, and print the command to launch with it."""
    from megatron_lynx.advise import answered
    from megatron_lynx.advise import as_json as as_json_of
    from megatron_lynx.plan import save_plan
    from megatron_lynx.planner.summary import summary
    from megatron_lynx.profiler.profile import save_profile

    asked, job, reading = _requested(**context.params)
    measured = _measured_beside(output) if profile_file is None and job.cluster.matmul is None else None
    check_writable(output, measured, read=[profile_file, launch_file, run_file, asked.job_file])
    job, costs, lesson = taught(job, profile_file, run_file)
    if measured is not None:
        save_profile(costs, measured)
        context.params["profile_file"] = measured
        say(f"wrote {measured}: what was measured here", err=True)
    with in_progress("making the plan"):
        answer = answered(job, costs, reading, near=False, copies=reading is not None and offload_ratio is None)
    if (decision := answer.decision) is None:
        if lesson is not None:
            say("\n".join(lesson.lines), err=True)
        _say_no(answer, as_json=as_json)
        return
    origin = {"asked": asked.again(_options(context)), "job": job.digest, **({} if lesson is None else lesson.origin)}
    provenance = decision.plan.provenance.model_copy(update=origin)
    save_plan(decision.plan.model_copy(update={"provenance": provenance}), output)
    if as_json:
        found = {} if lesson is None else {"from_run": lesson.as_json}
        own = as_json_of(answer)
        plan_ = {"plan": {"file": os.fspath(output), **own["plan"]}}
        show_json({**own, **plan_, **summary(decision, costs), **found, **understood_as_json(reading)})
        return
    show_answer(answer)
    if lesson is not None:
        say("\n".join(lesson.lines))
    if verbose:
        show_details(answer)
    say(f"wrote {output}; {_launched(answer, output, chosen=optimizer_offload is not None)}")


def _requested(
    *,
    words: list[str] | None,
    cluster: str | None,
    gpus: int | None,
    bridge: str | None,
    model: str | None,
    launch_file: Path | None,
    strict: bool,
    memory_gib: float | None,
    share: float | None,
    offload_ratio: str | None,
    host_memory_gib: float | None,
    optimizer_offload: str | None,
    load: float | None,
    hold: float | None,
    lengths: str | None,
    inexact: list[Inexact] | None,
    **_: object,
) -> tuple[Asked, Job, Reading | None]:
    """The subject and the job that the options of `plan` describe."""
    changes = budget_changes(memory_gib, share, offload_ratio, host_memory_gib) | expert_changes(load, hold)
    changes |= {} if optimizer_offload is None else {"optimizer.offload": number_or_word(optimizer_offload)}
    changes |= {} if lengths is None else {"batch.lengths": lengths_of(lengths)}
    changes |= {"head.pieces": "auto"} if inexact else {}
    asked = asked_about(words, cluster, gpus, launch_file, strict=strict, bridge=bridge, model=model)
    return asked, *job_or_launch(asked, planning=True, changes=changes)


def _measured_beside(output: Path) -> Path | None:
    """Path of a profile that is measured for a plan; None if the plan goes to a device or a pipe."""
    return None if output.exists() and not output.is_file() else output.with_name(f"{output.stem}.profile.yaml")


OF_THE_REQUEST = ("words", "cluster", "gpus", "bridge", "model", "launch_file", "strict")
"""Parameters of `plan` that are in `Asked`."""
OF_THE_ANSWER = ("output", "verbose", "as_json")


def _options(context: typer.Context) -> dict[str, object]:
    """The other options of `plan` that are given, by name."""
    given = {}
    for each in context.command.params:
        value = context.params.get(each.name or "")
        value = next(iter(value), None) if isinstance(value, list | tuple) else value
        if value is not None and each.name not in (*OF_THE_REQUEST, *OF_THE_ANSWER):
            given[each.opts[0]] = value
    return given


def planned_from(plan: Plan) -> tuple[Job, Reading | None, Path | None] | None:
    """The job of a plan, the reading of its launch, and its profile; None if the plan does not name them.

    Raises `ConfigError` if the job is gone.
    """
    if (asked := plan.provenance.asked) is None:
        return None
    group = cast("TyperGroup", get_command(app))
    context = group.commands["plan"].make_context("plan", ["-o", os.devnull, *shlex.split(asked)])
    _, job, reading = _requested(**context.params)
    if plan.provenance.job not in (None, job.digest):
        say(f"warning: `megatron-lynx plan {asked}` is another job now than when the plan was made", err=True)
    return job, reading, context.params["profile_file"]


def _launched(answer: Answer, output: Path, *, chosen: bool) -> str:
    """The command or flags to launch with. `chosen`: whether the plan's options, not the launch, decide about the optimizer's
    share on
    the host.
    """
    from megatron_lynx.launch_arguments.optimizer_facts import OF_THE_HOST, ON_HOST
    from megatron_lynx.plan.layout import launch_flags
    from megatron_lynx.planner.summary import host_optimizer_flags, job_environment, job_flags

    job, decision, reading = answer.job, answer.decision, answer.reading
    assert decision is not None, "there is a plan"
    if reading is None:
        variables = (f"{name}={value}" for name, value in job_environment(job, decision.plan).items())
        return f"its launch needs {' '.join([*variables, *launch_flags(decision.plan), *job_flags(decision.job)])}"
    own = host_optimizer_flags(decision.job) if chosen else []
    without = OF_THE_HOST if chosen and not own else ()
    file = reading.given["yaml_cfg"]
    drop = f"drop {ON_HOST} in {file}; " if without and file is not None and reading.given[ON_HOST] else ""
    added, lost = answer.switched
    return f"{drop}launch with it:\n\n{command_with(reading, job, decision.plan, output, [*added, *own], [*without, *lost])}"


def _say_no(answer: Answer, *, as_json: bool) -> None:
    """Print the launch without a plan, and what would fit. Raises the planner's error."""
    from megatron_lynx.advise import as_json as as_json_of

    if as_json:
        show_json(as_json_of(answer))
    else:
        show_answer(answer, reasons=False)
    assert answer.error is not None, "there is no plan, and somebody has said why"
    raise answer.error


@app.command()
def explain(plan_file: PlanFile, as_json: AsJson = False) -> None:
    """Show a plan, stage by stage: kept and recomputed items, windows, and predictions."""
    from megatron_lynx.plan import load_plan
    from megatron_lynx.plan.explanation import explanation

    plan = load_plan(plan_file)
    if as_json:
        show_json(plan.model_dump(mode="json", exclude_none=True))
    else:
        show(explanation(plan))


@app.command()
def simulate(
    plan_file: PlanFile,
    profile_file: Annotated[
        Path | None, typer.Option("--profile", metavar="PROFILE", help="A profile of the plan's job.", show_default=False)
    ] = None,
    job_file: Annotated[
        str | None,
        typer.Option(
            "--job",
            metavar="JOB",
            help="The plan's job, where the plan does not say it: its cluster has figures, too.",
        ),
    ] = None,
    trace: Annotated[Path | None, typer.Option("--trace", metavar="JSON", help="Write a trace, for ui.perfetto.dev.")] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate one step under a plan: bubbles, exposed recomputations, memory of each stage. `report` draws it."""
    from megatron_lynx.cost.host import HostReport
    from megatron_lynx.plan import load_plan
    from megatron_lynx.planner import figures_of
    from megatron_lynx.rehearsal import rehearse
    from megatron_lynx.simulator import figures
    from megatron_lynx.timeline import write_trace
    from megatron_lynx.units import format_bytes

    check_writable(trace, read=[plan_file, profile_file, None if job_file is None else job_path(job_file)])
    with in_progress("simulating a step"):
        plan = load_plan(plan_file)
        job, costs = _job_and_figures(plan, profile_file, job_file)
        reduced = job is not None and job.overlap.gradients
        simulation = rehearse(plan, costs, reduced_in_backward=reduced, job=job)
        own = None if job is None else figures_of(job, costs, simulation)
        update_s = plan.stages[0].predicted.update_s if own is None else own.update_s
        if trace is not None:
            memory = {stage: simulation.memory(stage) for stage in range(len(simulation.executed))}
            write_trace(simulation.timeline(), trace, "stage", memory)
    if as_json:
        show_json({**figures.as_json(simulation, update_s), **({} if own is None else {"memory_bytes": own.memory_bytes})})
    else:
        show(figures.table(simulation, update_s))
        if own is not None:
            say(f"fullest device: {format_bytes(own.memory_bytes)}")
        show_lines(*HostReport.of(costs, simulation.host_bound).lines)
        if trace is not None:
            say(f"wrote {trace}")


def _job_and_figures(plan: Plan, profile_file: Path | None, job_file: str | None) -> tuple[Job | None, Profile]:
    """The given job, else the plan's, as it is under the plan, and figures to simulate with. Measures nothing.

    With a profile, the plan's job need not exist any more.
    """
    from megatron_lynx.errors import LynxError
    from megatron_lynx.planner import as_planned

    job = None if job_file is None else job_named(job_file)
    if job is None:
        with nullcontext() if profile_file is None else suppress(LynxError):
            if (origin := planned_from(plan)) is not None:
                job, profile_file = origin[0], profile_file or origin[2]
    costs = figures_for(plan, profile_file, job)
    return None if job is None else as_planned(job, plan), costs
