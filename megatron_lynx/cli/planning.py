"""Commands that make plans and show what they do: profile, plan, explain, simulate."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_lynx.cli.advising import show_answer, show_details
from megatron_lynx.cli.answers import check_plot, check_writable, profile_in_words, write_simulation
from megatron_lynx.cli.app import app
from megatron_lynx.cli.inputs import figures_for, hosts_of, job_named, job_path, lengths_of, measured_here, number_or_word, taught
from megatron_lynx.cli.launches import asked_about, command_with, job_or_launch, understood_as_json
from megatron_lynx.cli.options import (
    AsJson,
    BridgeOption,
    ClusterOption,
    FromRunOption,
    GpusOption,
    HoldOption,
    HostMemoryOption,
    InexactOption,
    JobName,
    JobOrLaunch,
    LaunchFileOption,
    LayersOption,
    LengthsOption,
    LoadOption,
    MemoryOption,
    OffloadOption,
    OptimizerOption,
    PlanFile,
    ShareOption,
    StrictOption,
    VerboseOption,
    budget_changes,
    expert_changes,
    finite,
)
from megatron_lynx.cli.terminal import awaited, say, show, show_json, show_lines

if TYPE_CHECKING:
    from megatron_lynx.advise import Answer
    from megatron_lynx.config import Job
    from megatron_lynx.launch_arguments import Reading
    from megatron_lynx.planner import Decision


@app.command()
def profile(
    job_file: JobName,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="PROFILE", help="Where to write it.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Measure what a job's layers and links cost on this machine."""
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
    output: Annotated[Path, typer.Option("-o", "--output", metavar="PLAN", help="Where to write it.", show_default=False)],
    words: JobOrLaunch = None,
    cluster: ClusterOption = None,
    gpus: GpusOption = None,
    bridge: BridgeOption = None,
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
    """The best plan for a job, or for a Megatron launch, and the flags that its launch needs."""
    from megatron_lynx.advise import answered
    from megatron_lynx.advise import as_json as as_json_of
    from megatron_lynx.cost.update import update_s
    from megatron_lynx.plan import save_plan
    from megatron_lynx.planner import against_windows
    from megatron_lynx.planner.summary import summary

    changes = budget_changes(memory_gib, share, offload_ratio, host_memory_gib)
    changes |= {} if optimizer_offload is None else {"optimizer.offload": number_or_word(optimizer_offload)}
    changes |= expert_changes(load, hold)
    changes |= {} if lengths is None else {"batch.lengths": lengths_of(lengths)}
    changes |= {"head.pieces": "auto"} if inexact else {}
    asked = asked_about(words, cluster, gpus, launch_file, strict=strict, bridge=bridge)
    job, reading = job_or_launch(asked, planning=True, changes=changes)
    check_writable(output, read=[profile_file, launch_file, run_file, job_path(asked.words[0]) if reading is None else None])
    job, costs, lesson = taught(job, profile_file, run_file)
    with awaited("making the plan"):
        answer = answered(job, costs, reading, near=False)
    if (decision := answer.decision) is None:
        if lesson is not None:
            say("\n".join(lesson.lines), err=True)
        _say_no(answer, as_json=as_json)
        return
    compared = against_windows(decision, job, costs)
    head = next(iter(inexact or ()), None)
    options = {
        "--profile": profile_file,
        "--offload-ratio": offload_ratio,
        "--optimizer-offload": optimizer_offload,
        "--experts-load": load,
        "--experts-hold": hold,
        "--host-memory-gib": host_memory_gib,
        "--inexact": head,
        "--from-run": run_file,
    }
    origin = {"asked": asked.again(options), "job": job.digest, **({} if lesson is None else lesson.origin)}
    provenance = decision.plan.provenance.model_copy(update=origin)
    save_plan(decision.plan.model_copy(update={"provenance": provenance}), output)
    if as_json:
        found = {} if compared is None else {"userbuffers": compared.as_json}
        found |= {} if lesson is None else {"from_run": lesson.as_json}
        own = as_json_of(answer)
        plan_ = {"plan": {"file": os.fspath(output), **own["plan"]}}
        update = {"update_s": update_s(decision.job, costs)}
        show_json({**own, **plan_, **update, **summary(decision, costs), **found, **understood_as_json(reading)})
        return
    show_answer(answer)
    if lesson is not None:
        say("\n".join(lesson.lines))
    if compared is not None:
        say(compared.in_words)
    if verbose:
        show_details(answer)
    say(f"wrote {output}; {_launched(job, decision, reading, output, chosen=optimizer_offload is not None)}")


def _launched(job: Job, decision: Decision, reading: Reading | None, output: Path, *, chosen: bool) -> str:
    """What to launch with a plan. `chosen`: how much of the optimizer is on the host was asked of the plan, not of the launch."""
    from megatron_lynx.launch_arguments.optimizer_facts import OF_THE_HOST, ON_HOST
    from megatron_lynx.plan.layout import launch_flags
    from megatron_lynx.planner.summary import host_optimizer_flags, job_environment, job_flags

    if reading is None:
        variables = (f"{name}={value}" for name, value in job_environment(job, decision.plan).items())
        return f"its launch needs {' '.join([*variables, *launch_flags(decision.plan), *job_flags(decision.job)])}"
    own = host_optimizer_flags(decision.job) if chosen else []
    without = OF_THE_HOST if chosen and not own else ()
    file = reading.given["yaml_cfg"]
    drop = f"drop {ON_HOST} in {file}; " if without and file is not None and reading.given[ON_HOST] else ""
    return f"{drop}launch with it:\n\n{command_with(reading, job, decision.plan, output, own, without)}"


def _say_no(answer: Answer, *, as_json: bool) -> None:
    """What the launch takes without a plan, and what would fit; then why there is none. Raises what the planner raised."""
    from megatron_lynx.advise import as_json as as_json_of

    if as_json:
        show_json(as_json_of(answer))
    else:
        show_answer(answer, reasons=False)
    assert answer.error is not None, "there is no plan, and somebody has said why"
    raise answer.error


@app.command()
def explain(plan_file: PlanFile, as_json: AsJson = False) -> None:
    """What a plan does, stage by stage: kept, replayed, where, and what is expected of it."""
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
        typer.Option("--job", metavar="JOB", help="The plan's job: its cluster's figures are taken where there is no profile."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="PNG", help="Write a picture (matplotlib): stages over time, memory below."),
    ] = None,
    trace: Annotated[Path | None, typer.Option("--trace", metavar="JSON", help="Write a trace, for ui.perfetto.dev.")] = None,
    budget_mib: Annotated[
        float | None, typer.Option("--budget-mib", callback=finite, metavar="MIB", help="The budget, drawn beside the memory.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """One step under a plan, without running it: timeline, bubbles, exposed replays, memory of every stage."""
    from megatron_lynx.cost.host import HostReport
    from megatron_lynx.plan import load_plan
    from megatron_lynx.rehearsal import rehearse
    from megatron_lynx.simulator import figures

    check_plot(plot)
    check_writable(plot, trace, read=[plan_file, profile_file, None if job_file is None else job_path(job_file)])
    with awaited("simulating a step"):
        plan = load_plan(plan_file)
        costs = figures_for(plan, profile_file, job_file)
        job = None if job_file is None else job_named(job_file)
        reduced = job is not None and job.overlap.gradients
        simulation = rehearse(plan, costs, reduced_in_backward=reduced, job=job)
        written = write_simulation(simulation, plan_file, plot, trace, budget_mib)
    if as_json:
        show_json(figures.as_json(simulation))
    else:
        show(figures.table(simulation))
        show_lines(*HostReport.of(costs, simulation.host_bound).lines)
        for path in written:
            say(f"wrote {path}")
