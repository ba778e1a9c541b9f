"""The command advise, and the screen that it shares with plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from megatron_lynx.cli.app import app
from megatron_lynx.cli.inputs import costs_of
from megatron_lynx.cli.launches import Asked, asked_about, job_or_launch, show_understood, understood_as_json, warn_of_reading
from megatron_lynx.cli.options import (
    AsJson,
    BridgeOption,
    ClusterOption,
    GpusOption,
    HoldOption,
    HostMemoryOption,
    JobOrLaunch,
    LaunchFileOption,
    LayersOption,
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
from megatron_lynx.cli.terminal import in_progress, say, show, show_json, show_screen

if TYPE_CHECKING:
    from megatron_lynx.advise import Answer
    from megatron_lynx.config import Job
    from megatron_lynx.errors import Problem
    from megatron_lynx.launch_arguments import Reading
    from megatron_lynx.profiler.profile import Profile


@app.command()
def advise(
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
    load: LoadOption = None,
    hold: HoldOption = None,
    profile_file: LayersOption = None,
    verbose: VerboseOption = False,
    as_json: AsJson = False,
) -> None:
    """Compare the launch today, stock's best setting, a plan, and neighbouring layouts. Writes nothing."""
    from megatron_lynx.advise import answered
    from megatron_lynx.advise import as_json as as_json_of

    changes = budget_changes(memory_gib, share, offload_ratio, host_memory_gib) | expert_changes(load, hold)
    asked = asked_about(words, cluster, gpus, launch_file, strict=strict, bridge=bridge, model=model)
    job, reading, refused = _to_advise(asked, changes)
    costs = costs_of(job, profile_file)
    with in_progress("comparing layouts"):
        copies = reading is not None and offload_ratio is None
        answer = answered(job, costs, reading, refused=refused, near=profile_file is None, copies=copies)
    if as_json:
        show_json({**details_as_json(answer, costs), **as_json_of(answer), **understood_as_json(reading)})
    else:
        show_answer(answer)
        if verbose:
            show_details(answer)
    if answer.plan is None:
        raise typer.Exit(1)


def _to_advise(asked: Asked, changes: dict[str, Any]) -> tuple[Job, Reading | None, tuple[Problem, ...]]:
    """The job, and why the launch cannot run under a plan although its present setting can be priced."""
    from megatron_lynx.advise.today import asked_launch

    if not asked.is_launch or asked.cluster is None:
        return (*job_or_launch(asked, planning=True, changes=changes), ())
    launch = asked_launch(asked.words, asked.cluster, asked.gpus, changes, strict=asked.strict)
    warn_of_reading(launch.reading, launch.job)
    return launch.job, launch.reading, launch.refused


def show_answer(answer: Answer, *, reasons: bool = True) -> None:
    from megatron_lynx.advise import screen

    show_screen(screen(answer, reasons=reasons))


def show_details(answer: Answer) -> None:
    """Print how the launch was read, each stage's work, and the launch lines of neighbours."""
    from megatron_lynx.plan.explanation import explanation

    if answer.reading is not None:
        show_understood(answer.reading)
    if (decision := answer.decision) is not None:
        show(explanation(decision.plan))
        say("\n".join([*decision.host.lines, f"weight gradients: {decision.weight_gradients}"]))
    for number, near in enumerate(answer.near, start=1):
        command = answer.command(near)
        say(f"\n{number}. {answer.changed(near)}" + ("" if command is None else f"\n\n{command}"))


def details_as_json(answer: Answer, costs: Profile) -> dict[str, Any]:
    """Each stage's work; empty without a plan."""
    from megatron_lynx.planner.summary import summary

    return {} if answer.decision is None else summary(answer.decision, costs)
