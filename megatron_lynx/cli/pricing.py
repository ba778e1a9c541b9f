"""Commands that price jobs and run nothing: estimate, search, validate."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer

from megatron_lynx.cli.answers import show_estimate, show_left_out, show_published
from megatron_lynx.cli.app import command
from megatron_lynx.cli.inputs import named_in, whole_numbers_in
from megatron_lynx.cli.launches import asked_about, job_or_launch, show_understood, understood_as_json
from megatron_lynx.cli.options import AsJson, Budget, ExpertLoad, Subject, VerboseOption
from megatron_lynx.cli.terminal import in_progress, say, show, show_json
from megatron_lynx.errors import ConfigError, Problem


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
    from megatron_lynx.cost.budget import if_it_runs
    from megatron_lynx.estimate import LaunchEstimate
    from megatron_lynx.estimate import estimate as estimated
    from megatron_lynx.profiler.profile import load_profile

    job, reading = job_or_launch(asked_about(subject), budget.changes, planning=False)
    measured = None if profile_file is None else load_profile(profile_file)
    today = None if reading is None else reading.today
    if today is not None and today.not_priced:
        problems = [Problem("today", why, "", "plan, or price the launch without it") for why in today.not_priced]
        raise ConfigError("what this launch does today cannot be priced", problems)
    answer = estimated(job, measured) if today is None else estimated(job, measured, today.setting, graphs=today.graphs)
    launch = None if today is None else LaunchEstimate(today.name, today.flags, answer)
    if as_json:
        show_json({**answer.as_json, **({} if launch is None else launch.as_json), **understood_as_json(reading)})
    else:
        if reading is not None and verbose:
            show_understood(reading)
        show_estimate(answer, launch)
    if not answer.fits:
        say("\n".join(["this job does not fit", *(f"  - {problem}" for problem in answer.shortages)]), err=True)
        if launch is not None and launch.memory_bytes > answer.budget_bytes:
            say(if_it_runs(launch.memory_bytes), err=True)
        raise typer.Exit(1)


@dataclass(frozen=True, kw_only=True)
class Searched(Subject):
    gpus: Annotated[int, typer.Option(metavar="N", help="Devices to spread the job over.", show_default=False)] = field()


@command
def search(
    subject: Searched,
    expected: ExpertLoad,
    top: Annotated[int, typer.Option("--top", metavar="K", help="Number of layouts to simulate and show.")] = 10,
    policies: Annotated[
        str | None, typer.Option("--policies", metavar="A,B", help="Policies to try. Default: all.", show_default=False)
    ] = None,
    offload: Annotated[
        bool, typer.Option("--offload/--no-offload", help="Whether activations may go to host memory, no more than needed.")
    ] = True,
    across_nodes: Annotated[bool, typer.Option("--tensor-across-nodes", help="Let tensor-parallel groups span nodes.")] = False,
    schedules: Annotated[
        str | None,
        typer.Option(
            "--schedules",
            metavar="A,B",
            help="flush, interleaved, double-buffered (gradients one update old). Default: the first two, and the job's.",
            show_default=False,
        ),
    ] = None,
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
    """Find the fastest layouts. Replaces the job's layout, micro-batch size, policy, offload ratio and number of devices."""
    from megatron_lynx.launch_arguments.command_line import command_line
    from megatron_lynx.search import POLICIES
    from megatron_lynx.search import search as searched
    from megatron_lynx.search.table import table

    of_policies = POLICIES if policies is None else named_in(policies)
    of_schedules = None if schedules is None else named_in(schedules)
    sizes = None if context is None else whole_numbers_in(context, "--context")
    gpus = subject.gpus
    asked = asked_about(Subject(**vars(subject) | {"gpus": gpus if subject.model is not None else None}))
    if asked.is_launch and not command_line(asked.words or []).gpus:
        asked = replace(asked, gpus=gpus)
    job, _ = job_or_launch(asked, expected.changes, planning=False)
    with in_progress("layouts ranked") as watch:
        ranking = searched(
            job,
            gpus,
            top=top,
            policies=of_policies,
            offload=offload,
            across_nodes=across_nodes,
            schedules=of_schedules,
            contexts=sizes,
            watch=watch,
        )
    if as_json:
        show_json(ranking.as_json)
    else:
        show(table(ranking))
        say(f"{ranking.considered} candidates in {ranking.seconds:.2f} s")


@command
def validate(
    leave_one_out: Annotated[
        bool,
        typer.Option("--leave-one-out", help="Predict each series of published steps with constants fitted to the others."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Recompute published results, and print the error of each."""
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
