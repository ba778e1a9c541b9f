"""Commands about plans: advise, plan, explain, simulate, report; about prices: estimate, search, validate; and profile."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from typer.core import TyperGroup
from typer.main import get_command

from megatron_lynx.beside import Later, beside
from megatron_lynx.cli.app import app, command
from megatron_lynx.cli.options import (
    AsJson,
    Budget,
    ExpertLoad,
    JobName,
    JobOption,
    LayersOption,
    PlanFile,
    ProfileOption,
    Subject,
    VerboseOption,
    number_or_word,
    part_or_auto,
)
from megatron_lynx.cli.terminal import in_progress, say, show, show_json, show_lines, show_screen
from megatron_lynx.errors import ConfigError, Problem

if TYPE_CHECKING:
    from megatron_lynx.advise import Answer
    from megatron_lynx.config import Job
    from megatron_lynx.launch_arguments import Reading
    from megatron_lynx.plan import Plan


MANY_STAGES, MANY_GPUS = 8, 64
"""From so many stages, or devices to search for, plans take longer than the start of a process."""


def _beside(job: Job) -> AbstractContextManager[Later]:
    return beside(worth=job.parallel.pipeline * job.chunks >= MANY_STAGES)


@command
def profile(
    job_file: JobName,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="PROFILE", help="Where to write it.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Measure a job's layers and links on this machine."""
    from megatron_lynx.cli.answers import check_writable, profile_in_words
    from megatron_lynx.cli.inputs import hosts_of, job_named, measured_here
    from megatron_lynx.config.loader import job_path
    from megatron_lynx.profiler.profile import save_profile

    job = job_named(job_file)
    check_writable(output, read=[job_path(job_file)])
    hosts = hosts_of(job)
    measured = measured_here(job, hosts)
    save_profile(measured, output)
    if as_json:
        show_json(measured.model_dump(mode="json"))
    else:
        show(profile_in_words(measured, output))


@command
def advise(
    subject: Subject, budget: Budget, profile_file: LayersOption = None, verbose: VerboseOption = False, as_json: AsJson = False
) -> None:
    """Compare the launch today, stock's best setting, a plan, and neighbouring layouts. Writes nothing."""
    from megatron_lynx.advise import answered
    from megatron_lynx.advise import as_json as as_json_of
    from megatron_lynx.advise.today import asked_launch
    from megatron_lynx.cli.inputs import asked_about, costs_of, job_or_launch, understood_as_json, warn_of_reading

    asked, refused = asked_about(subject), tuple[Problem, ...]()
    if not asked.is_launch or asked.cluster is None:
        job, reading = job_or_launch(asked, budget.changes, planning=True)
    else:
        changes = {**asked.machine_changes, **budget.changes}
        launch = asked_launch(asked.words or [], asked.cluster, asked.gpus, changes, strict=asked.strict)
        job, reading, refused = launch.job, launch.reading, launch.refused
        warn_of_reading(launch.reading, job)
    costs = costs_of(job, profile_file)
    with in_progress("comparing layouts"), _beside(job) as later:
        copies = reading is not None and budget.offload_ratio is None
        answer = answered(job, costs, reading, refused=refused, near=profile_file is None, copies=copies, later=later)
    if as_json:
        from megatron_lynx.planner.summary import summary

        details = {} if answer.planned is None else summary(answer.planned)
        show_json({**details, **as_json_of(answer), **understood_as_json(reading)})
    else:
        _show_answer(answer, verbose=verbose)
    if answer.plan is None:
        raise typer.Exit(1)


def _show_answer(answer: Answer, *, reasons: bool = True, learned: Sequence[str] = (), verbose: bool = False) -> None:
    from megatron_lynx.advise import screen
    from megatron_lynx.cli.inputs import show_understood
    from megatron_lynx.plan.explanation import explanation

    show_screen(screen(answer, reasons=reasons))
    if learned:
        say("\n".join(learned))
    if not verbose:
        return
    if answer.reading is not None:
        show_understood(answer.reading)
    if (decision := answer.planned) is not None:
        show(explanation(decision.plan))
        say("\n".join([*decision.host.lines, f"weight gradients: {decision.weight_gradients}"]))
    for number, near in enumerate(answer.near, start=1):
        line = answer.command(near)
        say(f"\n{number}. {answer.changed(near)}" + ("" if line is None else f"\n\n{line}"))


class Inexact(StrEnum):
    HEAD = "head"


@dataclass(frozen=True, kw_only=True)
class Request(Budget, Subject):
    optimizer_offload: Annotated[
        str | None,
        typer.Option(
            callback=part_or_auto, metavar="SHARE", help="Share of the optimizer that goes to the host: in [0, 1], or auto."
        ),
    ] = None
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="MEAN|FILE",
            help="Lengths of packed sequences: their mean in tokens, or a file. Attention is priced by them.",
            show_default=False,
        ),
    ] = None
    inexact: Annotated[
        list[Inexact] | None,
        typer.Option(
            metavar="head",
            help="head: run the head in pieces if that helps. The last stage holds fewer logits, and the gradient of the head's "
            "weight is summed in another order than stock's. Default: as in the job, else all bits are stock's.",
        ),
    ] = None

    @property
    def changes(self) -> dict[str, object]:
        from megatron_lynx.cli.inputs import lengths_of

        share, lengths = self.optimizer_offload, self.lengths
        changes = super().changes
        changes |= {} if share is None else {"optimizer.offload": number_or_word(share)}
        changes |= {} if lengths is None else {"batch.lengths": lengths_of(lengths)}
        return changes | ({"head.pieces": "auto"} if self.inexact else {})

    def read(self) -> tuple[Subject, Job, Reading | None]:
        from megatron_lynx.cli.inputs import asked_about, job_or_launch

        asked = asked_about(self)
        return asked, *job_or_launch(asked, self.changes, planning=True)


@command
def plan(
    context: typer.Context,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="PLAN", help="Where to write it.", show_default=False)],
    request: Request,
    profile_file: LayersOption = None,
    run_file: Annotated[
        Path | None,
        typer.Option(
            "--from-run",
            metavar="OUTCOME",
            help="The lynx_outcome.json of an earlier run of the same job: its measurements correct the predictions.",
            show_default=False,
        ),
    ] = None,
    verbose: VerboseOption = False,
    as_json: AsJson = False,
) -> None:
    """Make the best plan for a job or a Megatron launch, and print the command to launch with it."""
    from megatron_lynx.advise import answered
    from megatron_lynx.advise import as_json as as_json_of
    from megatron_lynx.cli.answers import check_writable
    from megatron_lynx.cli.inputs import taught, understood_as_json
    from megatron_lynx.plan import save_plan
    from megatron_lynx.planner.summary import summary
    from megatron_lynx.profiler.profile import save_profile

    asked, job, reading = request.read()
    measures = profile_file is None and job.cluster.matmul is None
    measures = measures and (output.is_file() or not output.exists())  # and not a device or a pipe
    measured = output.with_name(f"{output.stem}.profile.yaml") if measures else None
    check_writable(output, measured, read=[profile_file, request.launch_file, run_file, asked.job_file])
    job, costs, lesson = taught(job, profile_file, run_file)
    if measured is not None:
        save_profile(costs, measured)
        context.params["profile_file"] = measured
        say(f"wrote {measured}: what was measured here", err=True)
    with in_progress("making the plan"), _beside(job) as later:
        copies = reading is not None and request.offload_ratio is None
        answer = answered(job, costs, reading, near=False, copies=copies, later=later)
    learned = () if lesson is None else lesson.lines
    if (decision := answer.planned) is None:
        if learned:
            say("\n".join(learned), err=True)
        if as_json:
            show_json(as_json_of(answer))
        else:
            _show_answer(answer, reasons=False)
        assert answer.error is not None, "there is no plan, and the planner has said why"
        raise answer.error
    origin = {"asked": asked.again(_options(context)), "job": job.digest, **({} if lesson is None else lesson.origin)}
    provenance = decision.plan.provenance.model_copy(update=origin)
    save_plan(decision.plan.model_copy(update={"provenance": provenance}), output)
    if as_json:
        corrections = {} if lesson is None else {"from_run": lesson.as_json}
        answer_json = as_json_of(answer)
        plan_ = {"plan": {"file": os.fspath(output), **answer_json["plan"]}}
        show_json({**answer_json, **plan_, **summary(decision), **corrections, **understood_as_json(reading)})
        return
    _show_answer(answer, learned=learned, verbose=verbose)
    say(f"wrote {output}; {_launched(answer, output, chosen=request.optimizer_offload is not None)}")


def _options(context: typer.Context) -> dict[str, object]:
    """The given options of `plan`, by name, but for those in `Subject.again` and those that change only the answer."""
    left_out = {*(field.name for field in fields(Subject)), "output", "verbose", "as_json"}
    given = {}
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        value = next(iter(value), None) if isinstance(value, list | tuple) else value
        if value not in (None, False) and parameter.name not in left_out:
            given[parameter.opts[0]] = value
    return given


def planned_from(plan: Plan) -> tuple[Job, Path | None] | None:
    """The job of a plan and its profile; None if not named. Raises `ConfigError` if they are gone."""
    if (asked := plan.provenance.asked) is None:
        return None
    group = cast("TyperGroup", get_command(app))
    given = group.commands["plan"].make_context("plan", ["-o", os.devnull, *shlex.split(asked)]).params
    _, job, _ = Request(**{field.name: given[field.name] for field in fields(Request)}).read()
    if plan.provenance.job not in (None, job.digest):
        say(f"warning: `megatron-lynx plan {asked}` is another job now than when the plan was made", err=True)
    return job, given["profile_file"]


def _launched(answer: Answer, output: Path, *, chosen: bool) -> str:
    from megatron_lynx.cli.inputs import command_with
    from megatron_lynx.launch_arguments.model_facts import OF_THE_HOST
    from megatron_lynx.plan.layout import launch_flags
    from megatron_lynx.planner.summary import host_optimizer_flags, job_environment, job_flags

    job, decision, reading = answer.job, answer.planned, answer.reading
    assert decision is not None, "there is a plan"
    if reading is None:
        variables = (f"{name}={value}" for name, value in job_environment(job, decision.plan).items())
        return f"its launch needs {' '.join([*variables, *launch_flags(decision.plan), *job_flags(decision.job)])}"
    flags = [*host_optimizer_flags(decision.job)] if chosen else []
    without = OF_THE_HOST if chosen and not flags else ()
    added, lost = answer.switched
    return f"launch with it:\n\n{command_with(reading, job, decision.plan, output, [*added, *flags], [*without, *lost])}"


@command
def explain(
    plan_file: PlanFile,
    every: Annotated[
        bool, typer.Option("--all", help="Layer by layer: kept and recomputed items, windows, predictions.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show a plan on one screen: its launch, and what is recomputed, delayed and offloaded on each stage. --all: every layer."""
    from megatron_lynx.plan import load_plan
    from megatron_lynx.plan.explanation import explanation, summary

    plan = load_plan(plan_file)
    if as_json:
        show_json(plan.model_dump(mode="json", exclude_none=True))
    else:
        show(explanation(plan) if every else summary(plan))


@command
def simulate(
    plan_file: PlanFile,
    profile_file: ProfileOption = None,
    job_file: JobOption = None,
    trace: Annotated[Path | None, typer.Option("--trace", metavar="JSON", help="Write a trace, for ui.perfetto.dev.")] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate one step under a plan: bubbles, exposed recomputations, memory of each stage. `report` draws it."""
    from megatron_lynx.cli.answers import check_writable
    from megatron_lynx.cli.inputs import figures_for, job_named
    from megatron_lynx.config.loader import job_path
    from megatron_lynx.cost.host import HostReport
    from megatron_lynx.errors import LynxError
    from megatron_lynx.plan import load_plan
    from megatron_lynx.planner import as_planned, figures_of
    from megatron_lynx.rehearsal import rehearse
    from megatron_lynx.simulator import figures
    from megatron_lynx.timeline import write_trace
    from megatron_lynx.units import format_bytes

    check_writable(trace, read=[plan_file, profile_file, None if job_file is None else job_path(job_file)])
    with in_progress("simulating a step"):
        plan = load_plan(plan_file)
        job = None if job_file is None else job_named(job_file)
        if job is None:
            with nullcontext() if profile_file is None else suppress(LynxError):  # with a profile, the job may be gone
                if (origin := planned_from(plan)) is not None:
                    job, profile_file = origin[0], profile_file or origin[1]
        costs = figures_for(plan, profile_file, job)
        job = None if job is None else as_planned(job, plan)
        simulation = rehearse(plan, costs, job=job, whole=True)
        job_figures = None if job is None else figures_of(job, costs, simulation)
        update_s = plan.stages[0].predicted.update_s if job_figures is None else job_figures.update_s
        if trace is not None:
            memory = {stage: simulation.memory(stage) for stage in range(len(simulation.executed))}
            write_trace(simulation.timeline(), trace, "stage", memory)
    if as_json:
        held = {} if job_figures is None else {"memory_bytes": job_figures.memory_bytes}
        show_json({**figures.as_json(simulation, update_s), **held})
        return
    show(figures.table(simulation, update_s))
    if job_figures is not None:
        say(f"fullest device: {format_bytes(job_figures.memory_bytes)}")
    show_lines(*HostReport.of(costs, simulation.host_bound).lines)
    if trace is not None:
        say(f"wrote {trace}")


@command
def report(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="WHAT...",
            help="A plan, a job, the folder that compare wrote, a run's trace with its plan: files and folders, each recognised "
            "by its contents.",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="HTML", help="Where to write it.")] = Path("report.html"),
    profile_file: ProfileOption = None,
    job_file: JobOption = None,
    budgets: Annotated[
        int, typer.Option("--budgets", min=0, max=100, metavar="N", help="Plans on the front of memory and time; 0: no front.")
    ] = 12,
) -> None:
    """Write one HTML file that needs no network: schedule, waits, memory, plans over budgets; predicted and measured."""
    from megatron_lynx.cli.answers import check_writable
    from megatron_lynx.cli.inputs import job_named, known_costs, mention_assumed
    from megatron_lynx.profiler.profile import as_learned, load_profile
    from megatron_lynx.report.contents import report as page_of
    from megatron_lynx.report.given import given_in
    from megatron_lynx.whole_file import write_whole

    given = given_in([*what, *([] if profile_file is None else [str(profile_file)])])
    check_writable(output, read=map(Path, given.sources.values()))
    if given.job is not None:
        mention_assumed(given.job)
    job, costs = given.job if job_file is None else job_named(job_file), given.profile
    if job is None and given.plan is not None and (origin := planned_from(given.plan)) is not None:
        job, profile_path = origin
        costs = costs if costs is not None or profile_path is None else load_profile(profile_path)
    costs = known_costs(job, costs)
    if given.plan is not None and (learned := given.plan.provenance.learned) is not None:  # earlier runs correct all prices
        job = None if job is None else job.model_copy(update={"learned": learned})
        costs = None if costs is None else as_learned(costs, learned)
    with in_progress("plans made") as watch:
        page = page_of(given, job, costs, budgets, watch)
    write_whole(output, page)
    say(f"wrote {output} ({output.stat().st_size / 1e6:.1f} MB): open it in a browser")


@command
def estimate(
    subject: Subject,
    budget: Budget,
    profile_file: Annotated[
        Path | None, typer.Option("--profile", metavar="PROFILE", help="Measured layers. Default: the cluster's figures.")
    ] = None,
    verbose: VerboseOption = False,
    as_json: AsJson = False,
) -> None:
    """Estimate memory and time of a job or a Megatron launch with its own recomputation and offloading. Measures nothing."""
    from megatron_lynx.cli.answers import show_estimate
    from megatron_lynx.cli.inputs import asked_about, job_or_launch, show_understood, understood_as_json
    from megatron_lynx.cost.budget import if_it_runs
    from megatron_lynx.estimate import estimate as estimated
    from megatron_lynx.profiler.profile import load_profile

    job, reading = job_or_launch(asked_about(subject), budget.changes, planning=False)
    measured = None if profile_file is None else load_profile(profile_file)
    today = None if reading is None else reading.today
    if today is not None and today.not_priced:
        problems = [Problem("today", why, "", "plan, or price the launch without it") for why in today.not_priced]
        raise ConfigError("what this launch does today cannot be priced", problems)
    answer = estimated(job, measured, today)
    if as_json:
        show_json({**answer.as_json, **understood_as_json(reading)})
    else:
        if reading is not None and verbose:
            show_understood(reading)
        show_estimate(answer)
    if not answer.fits:
        say("\n".join(["this job does not fit", *(f"  - {problem}" for problem in answer.shortages)]), err=True)
        if today is not None and answer.memory_bytes > job.memory_budget_bytes:
            say(if_it_runs(answer.memory_bytes), err=True)
        raise typer.Exit(1)


@dataclass(frozen=True, kw_only=True)
class Searched(Subject):
    gpus: Annotated[int, typer.Option(metavar="N", help="Devices to spread the job over.", show_default=False)] = field()


@command
def search(
    subject: Searched,
    expected: ExpertLoad,
    top: Annotated[int, typer.Option("--top", metavar="K", help="Number of layouts to plan and show.")] = 10,
    policies: Annotated[
        str | None, typer.Option("--policies", metavar="A,B", help="Policies to try. Default: all.", show_default=False)
    ] = None,
    offload: Annotated[
        bool, typer.Option("--offload/--no-offload", help="Whether plans may copy activations to host memory.")
    ] = True,
    context: Annotated[
        str | None,
        typer.Option(
            "--context",
            metavar="A,B",
            help="Context-parallel sizes to try. Default: all, with plans only for the job's own size.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest layouts. Replaces the job's layout, micro-batch size, policy, offload ratio and number of devices.

    They are chosen before weight gradients are placed in waits (up to 8 % of a step): one that gains most may be missing.
    """
    from megatron_lynx.cli.inputs import asked_about, job_or_launch, named_in, whole_numbers_in
    from megatron_lynx.launch_arguments.command_line import command_line
    from megatron_lynx.search import POLICIES
    from megatron_lynx.search import search as searched
    from megatron_lynx.search.search import table

    of_policies = POLICIES if policies is None else named_in(policies)
    sizes = None if context is None else whole_numbers_in(context, "--context")
    gpus = subject.gpus
    asked = asked_about(Subject(**vars(subject) | {"gpus": gpus if subject.model is not None else None}))
    if asked.is_launch and not command_line(asked.words or []).gpus:
        asked = replace(asked, gpus=gpus)
    job, _ = job_or_launch(asked, expected.changes, planning=False)
    with in_progress("layouts ranked") as watch, beside(worth=gpus >= MANY_GPUS and top > 1) as later:
        ranking = searched(job, gpus, top=top, policies=of_policies, offload=offload, contexts=sizes, watch=watch, later=later)
    if as_json:
        show_json(ranking.as_json)
    else:
        show(table(ranking))
        if ranking.within_error:
            say(ranking.within_error)
        say(f"{ranking.considered} candidates in {ranking.seconds:.2f} s")


@command
def validate(
    leave_one_out: Annotated[
        bool, typer.Option("--leave-one-out", help="Predict each series of published steps with constants fitted to the others.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Recompute published results, and print the error of each."""
    from megatron_lynx.cli.answers import show_left_out, show_published
    from megatron_lynx.published import all_rows
    from megatron_lynx.published.left_out import left_out

    rows = all_rows()
    if leave_one_out:
        with in_progress("steps predicted") as watch:
            answer = left_out(rows, watch)
        if as_json:
            show_json(answer.as_json)
        else:
            show_left_out(answer)
        return
    missed = [row for row in rows if row.within is False]
    if as_json:
        show_json({"rows": [row.as_json for row in rows]})
    else:
        show_published(rows)
    say(f"{len(rows)} rows, {len(missed)} outside their bound", err=True)
    if missed:
        raise typer.Exit(1)
