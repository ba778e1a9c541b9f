"""Commands about this machine and its Megatron: compare, hooks, doctor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_lynx.cli.app import command
from megatron_lynx.cli.options import AsJson, Budget, ClusterOption, LaunchFileOption, ProfileOption, Subject
from megatron_lynx.cli.terminal import announced, page, quieten_megatron, say, show_json, show_lines
from megatron_lynx.errors import ConfigError, Problem

if TYPE_CHECKING:
    from megatron_lynx.advise.today import Stock
    from megatron_lynx.config import Job
    from megatron_lynx.launch_arguments import Reading
    from megatron_lynx.plan import Plan
    from megatron_lynx.profiler.profile import Profile


@command
def compare(
    subject: Subject,
    budget: Budget,
    plan_file: Annotated[Path | None, typer.Option("--plan", metavar="PLAN", help="Default: a plan is made.")] = None,
    profile_file: ProfileOption = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Timed steps of each setting.")] = 5,
    warmups: Annotated[int, typer.Option("--steps-warmup", min=0, help="Steps of each setting before those.")] = 1,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="Where the reports go.")] = Path(
        "build/compare"
    ),
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Train nothing: simulate the plan and stock's fastest settings that fit.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a job on this machine under stock Megatron's settings and under a plan, side by side.

    With --simulate nothing is trained, and the GPUs of the job or launch need not be here. A job without flushes is always
    simulated.
    """
    from megatron_lynx.cli.answers import make_folder, write_comparison
    from megatron_lynx.cli.inputs import asked_about, hosts_of, job_or_launch, plan_for
    from megatron_lynx.compare import as_json as rows_as_json
    from megatron_lynx.compare import print_report
    from megatron_lynx.planner import as_planned
    from megatron_lynx.testbed.comparison import compare as run

    asked = asked_about(subject)
    job, reading = job_or_launch(asked, budget.changes, planning=True)
    if asked.cluster is not None and not simulate:
        problem = Problem("--cluster", asked.cluster, "--simulate beside it", "nothing of a launch is trained here")
        raise ConfigError("a launch is compared by simulating it", [problem])
    make_folder(output)
    if simulate or job.schedule == "double_buffered":
        _compare_simulated(job, reading, plan_file, profile_file, output, as_json)
        return
    hosts = hosts_of(job)
    made = plan_for(job, hosts, plan_file, profile_file, output)
    comparison = run(as_planned(job, made), made, hosts, announced, rounds=rounds, warmups=warmups)
    written = write_comparison(comparison, made, output)
    if as_json:
        show_json(rows_as_json(comparison.measurement))
    else:
        print_report(comparison.measurement, page())
        say("\n".join(f"wrote {path}" for path in written))
    if not comparison.gradients_equal:
        say("gradients under the plan differ from stock Megatron's", err=True)
        raise typer.Exit(1)


def _compare_simulated(
    job: Job, reading: Reading | None, plan_file: Path | None, profile_file: Path | None, output: Path, as_json: bool
) -> None:
    from megatron_lynx.advise import answered
    from megatron_lynx.advise.today import as_stock, launch_today
    from megatron_lynx.cli.answers import show_simulated
    from megatron_lynx.cli.inputs import plan_and_costs
    from megatron_lynx.planner import as_planned
    from megatron_lynx.planner.evaluation import figures_of, range_of
    from megatron_lynx.rehearsal import rehearse
    from megatron_lynx.stock.legality import NEWEST
    from megatron_lynx.stock.rival import SimulatedRow, rivals, side_by_side, verdict

    advised: list[Stock] = []

    def as_advised(job: Job, costs: Profile) -> Plan:
        answer = answered(job, costs, reading, near=False, copies=reading is not None)
        if answer.planned is None:
            assert answer.error is not None, "there is no plan, and the planner has said why"
            raise answer.error
        if answer.stock is not None and job.cluster.device == "cuda":  # on the testbed stock gets the plan's bytes
            advised.append(answer.stock)
        return answer.planned.plan

    without_flushes = job.schedule == "double_buffered"
    made, costs = plan_and_costs(job, plan_file, profile_file, output, make=None if without_flushes else as_advised)
    parted = as_planned(job, made)
    simulation = rehearse(made, costs, job=parted)
    figures = figures_of(parted, costs, simulation)
    step = range_of(made, parted, costs, simulation).plus(figures.update_s)
    budget_bytes = parted.memory_budget_bytes if parted.cluster.device == "cuda" else figures.memory_bytes
    today = None if reading is None else launch_today(job, costs, reading)
    row = None if today is None else today.row
    first = None if today is None or row is None else SimulatedRow(f"today: {today.setting}", row.step, row.memory_bytes)
    ours = SimulatedRow("ours, without flushes" if without_flushes else "ours", step, figures.memory_bytes, ours=True)
    release = NEWEST if reading is None else reading.given.release
    stock_job = as_stock(job)
    prices = advised[0].rivals if advised else rivals(stock_job, costs, budget_bytes, release)
    rows = side_by_side(stock_job, costs, ours, prices, first)
    if as_json:
        show_json({"rows": [row.as_json for row in rows]})
        return
    show_simulated(rows)
    show_lines(verdict(rows, budget_bytes, experts=job.model.experts is not None))
    if without_flushes:
        say("a batch without flushes has gradients that are one update old: compare losses, not only seconds")


@command
def hooks(as_json: AsJson = False) -> None:
    """List the functions of the installed megatron-core that are hooked, and whether they are as recorded."""
    from megatron_lynx.cli.answers import show_held

    with announced("reading megatron-core"):
        quieten_megatron()
        from megatron_lynx.apply.releases import held_here, installed_version
        from megatron_lynx.double_buffered.releases import held_here as held_without_flushes

        held = [*held_here(), *held_without_flushes()]
    sites, stale = {row.site for row in held}, {row.site for row in held if not row.as_recorded}
    if as_json:
        rows = [{"hook": row.hook, "site": row.site, "release": row.release, "as_recorded": row.as_recorded} for row in held]
        show_json({"megatron_core": installed_version(), "hooks": rows})
    else:
        show_held(held, f"megatron-core {installed_version()}: {len(sites)} functions relied on, {len(stale)} not as recorded")
    if stale:
        raise typer.Exit(1)


@command
def doctor(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[-- LAUNCH]", help="A Megatron launch to look at, too.", show_default=False)
    ] = None,
    cluster: ClusterOption = None,
    launch_file: LaunchFileOption = None,
    as_json: AsJson = False,
) -> None:
    """Find settings, here or in a launch, that defeat overlap: their cost, and what to set. Needs no GPU."""
    from dataclasses import asdict

    from megatron_lynx.cli.answers import show_findings
    from megatron_lynx.cli.inputs import asked_about
    from megatron_lynx.doctor import findings

    asked = Subject(words=words or [], cluster=cluster, launch_file=launch_file)
    asked = asked if launch_file is None else asked_about(asked)
    with announced("looking around"):
        quieten_megatron()
        reported = list(findings(asked.words or [], cluster=asked.cluster))
    if as_json:
        show_json({"findings": [asdict(finding) for finding in reported]})
    else:
        show_findings(reported)
    if any(finding.level == "defeats" for finding in reported):
        raise typer.Exit(1)
