"""Commands that price jobs and run nothing: estimate, search, validate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from megatron_lynx.cli.answers import show_estimate, show_published
from megatron_lynx.cli.app import app
from megatron_lynx.cli.inputs import named_in, whole_numbers_in
from megatron_lynx.cli.launches import asked_about, job_or_launch, priceable, show_understood, understood_as_json
from megatron_lynx.cli.options import (
    AsJson,
    BridgeOption,
    ClusterOption,
    GpusOption,
    HoldOption,
    HostMemoryOption,
    JobOrLaunch,
    LaunchFileOption,
    LoadOption,
    MemoryOption,
    ModelOption,
    OffloadOption,
    ShareOption,
    StrictOption,
    VerboseOption,
    budget_changes,
    expert_changes,
)
from megatron_lynx.cli.terminal import in_progress, say, show, show_json


@app.command()
def estimate(
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
    load: LoadOption = None,
    hold: HoldOption = None,
    profile_file: Annotated[
        Path | None, typer.Option("--profile", metavar="PROFILE", help="Measured layers; without, the cluster's figures.")
    ] = None,
    offload_ratio: OffloadOption = None,
    verbose: VerboseOption = False,
    as_json: AsJson = False,
) -> None:
    """Estimate memory and time of a job or a Megatron launch with its own recomputation and offloading. Measures nothing."""
    from megatron_lynx.cost.budget import if_it_runs
    from megatron_lynx.estimate import LaunchEstimate
    from megatron_lynx.estimate import estimate as estimated
    from megatron_lynx.profiler.profile import load_profile

    changes = budget_changes(memory_gib, share, offload_ratio, host_memory_gib) | expert_changes(load, hold)
    asked = asked_about(words, cluster, gpus, launch_file, strict=strict, bridge=bridge, model=model)
    job, reading = job_or_launch(asked, planning=False, changes=changes)
    measured = None if profile_file is None else load_profile(profile_file)
    today = None if reading is None else priceable(reading)
    answer = estimated(job, measured, None if today is None else today.setting)
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


@app.command()
def search(
    gpus: Annotated[int, typer.Option("--gpus", metavar="N", help="Devices to spread the job over.", show_default=False)],
    words: JobOrLaunch = None,
    cluster: ClusterOption = None,
    bridge: BridgeOption = None,
    model: ModelOption = None,
    launch_file: LaunchFileOption = None,
    strict: StrictOption = False,
    load: LoadOption = None,
    hold: HoldOption = None,
    top: Annotated[int, typer.Option("--top", metavar="K", help="How many layouts to show; each is simulated.")] = 10,
    policies: Annotated[
        str | None, typer.Option("--policies", metavar="A,B", help="Policies to try; without, every one.", show_default=False)
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
            help="Of flush, interleaved, double-buffered (gradients one update old); without, the first two, and the job's.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(
            "--context",
            metavar="A,B",
            help="Context-parallel sizes to try, with plans, too; without, all, but plans for the job's own size alone.",
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
    of_model = None if model is None else gpus
    asked = asked_about(words, cluster, of_model, launch_file, strict=strict, bridge=bridge, model=model)
    own_gpus = gpus if asked.is_launch and not command_line(asked.words).gpus else of_model
    job, _ = job_or_launch(replace(asked, gpus=own_gpus), planning=False, changes=expert_changes(load, hold))
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


@app.command()
def validate(as_json: AsJson = False) -> None:
    """Recompute published results, and print the error of each."""
    from megatron_lynx.published import all_rows

    rows = all_rows()
    missed = [row for row in rows if row.within is False]
    if as_json:
        show_json({"rows": [row.as_json for row in rows]})
    else:
        show_published(rows)
    say(f"{len(rows)} rows, {len(missed)} outside their bound", err=True)
    if missed:
        raise typer.Exit(1)
