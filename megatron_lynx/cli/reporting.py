"""The command report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_lynx.cli.answers import check_writable
from megatron_lynx.cli.app import app
from megatron_lynx.cli.inputs import job_named, mention_experts, warn_of
from megatron_lynx.cli.planning import planned_from
from megatron_lynx.cli.terminal import in_progress, say

if TYPE_CHECKING:
    from megatron_lynx.config import Job
    from megatron_lynx.profiler.profile import Profile


@app.command()
def report(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="WHAT...",
            help="A plan, a job, the folder that compare wrote, a run's trace with its plan, what simulate --json printed: files "
            "and folders, each recognised by its contents.",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="HTML", help="Where to write it.")] = Path("report.html"),
    profile_file: Annotated[
        Path | None, typer.Option("--profile", metavar="PROFILE", help="Measured layers, to predict with.", show_default=False)
    ] = None,
    job_file: Annotated[
        str | None,
        typer.Option(
            "--job",
            metavar="JOB",
            help="The plan's job, where the plan does not say it.",
        ),
    ] = None,
    budgets: Annotated[
        int, typer.Option("--budgets", min=0, max=100, metavar="N", help="Plans on the front of memory and time; 0: no front.")
    ] = 12,
) -> None:
    """Write one HTML file that needs no network: schedule, waits, memory, plans over budgets; predicted and measured."""
    from megatron_lynx.profiler.profile import load_profile
    from megatron_lynx.profiler.scaled import as_learned
    from megatron_lynx.report.contents import Asked, contents
    from megatron_lynx.report.given import given_in
    from megatron_lynx.report.island import write_page

    given = given_in([*what, *([] if profile_file is None else [str(profile_file)])])
    check_writable(output, read=map(Path, given.sources.values()))
    if given.job is not None:
        mention_experts(given.job)
    job, reading, profile = given.job if job_file is None else job_named(job_file), None, given.profile
    if job is None and given.plan is not None and (origin := planned_from(given.plan)) is not None:
        job, reading, own = origin
        profile = profile if profile is not None or own is None else load_profile(own)
    learned, costs = None if given.plan is None else given.plan.provenance.learned, _costs(job, profile)
    if learned is not None:  # an earlier run's corrections apply to all prices
        job = None if job is None else job.model_copy(update={"learned": learned})
        costs = None if costs is None else as_learned(costs, learned)
    with in_progress("plans made") as watch:
        island = contents(Asked(given, job, costs, reading, budgets, watch))
    write_page(island, output)
    say(f"wrote {output} ({output.stat().st_size / 1e6:.1f} MB): open it in a browser")


def _costs(job: Job | None, given: Profile | None) -> Profile | None:
    """The figures to predict with, from the job's described cluster and the profile. Measures nothing."""
    from megatron_lynx.profiler.analytic import analytic_profile, on_cluster

    if given is not None:
        warn_of(given)
    if job is None or job.cluster.matmul is None:
        return given
    return analytic_profile(job) if given is None else on_cluster(given, job)
