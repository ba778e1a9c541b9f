"""Arguments and options that several commands take."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from megatron_lynx.cli.inputs import number_or_word


def _names_of(kind: str) -> Callable[[str], list[str]]:
    """Complete names of bundled clusters or models."""

    def names(incomplete: str) -> list[str]:
        from megatron_lynx.config.loader import bundled_configs

        return sorted(file.stem for file in bundled_configs().glob(f"{kind}/*.yaml") if file.stem.startswith(incomplete))

    return names


PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.", show_default=False)]


JobName = Annotated[str, typer.Argument(metavar="JOB", help="A job file, or a bundled one: jobs/demo.", show_default=False)]


JobOrLaunch = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="JOB | --cluster C -- LAUNCH",
        help="A job file, or a bundled one: jobs/demo. With --cluster: a Megatron launch, as in `-- torchrun ... pretrain_gpt.py "
        "--num-layers 32 ...`, or its arguments alone.",
        show_default=False,
    ),
]


ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="CLUSTER",
        help="Where the launch is to run: h100 (h100-80g), or a file.",
        autocompletion=_names_of("clusters"),
    ),
]


ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="In place of a job or a launch, with --cluster and --gpus: a catalogued model (llama3-70b), or a file, in the "
        "smallest layout that fits.",
        autocompletion=_names_of("models"),
        show_default=False,
    ),
]


LaunchFileOption = Annotated[
    Path | None,
    typer.Option(
        "--launch-file",
        metavar="FILE",
        help="The launch, one word a line, or - for standard input; '# cluster: C' in its header stands for --cluster.",
        show_default=False,
    ),
]


BridgeOption = Annotated[
    str | None,
    typer.Option(
        "--bridge",
        metavar="MODULE:RECIPE|FILE",
        help="Of Megatron-Bridge, not a launch: a function that returns its ConfigContainer, or one in a file. Behind -- its "
        "settings: model.seq_length=8192.",
        show_default=False,
    ),
]


StrictOption = Annotated[
    bool, typer.Option("--strict", help="Refuse flags that Megatron does not know. Without: planned, with a warning.")
]


VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Also what was read of the launch, and what each stage does.")
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


class Inexact(StrEnum):
    """Parts of a plan that need not equal stock in every bit."""

    HEAD = "head"


InexactOption = Annotated[
    list[Inexact] | None,
    typer.Option(
        "--inexact",
        metavar="head",
        help="Let the head run in pieces where that helps: the last stage holds fewer logits, and the gradient of the head's "
        "weight is summed in another order than stock's. Without: as the job says (head), else every bit is stock's.",
    ),
]


def finite(figure: float | None) -> float | None:
    if figure is not None and not 0 < figure < float("inf"):
        raise typer.BadParameter(f"found {figure}, needed a number above 0")
    return figure


FromRunOption = Annotated[
    Path | None,
    typer.Option(
        "--from-run",
        metavar="OUTCOME",
        help="The lynx_outcome.json of a run under a plan for the same: planned with what was measured.",
        show_default=False,
    ),
]
OptimizerOption = Annotated[
    str | None,
    typer.Option("--optimizer-offload", metavar="SHARE", help="Of the optimizer, to the host: in [0, 1], or auto."),
]
LengthsOption = Annotated[
    str | None,
    typer.Option(
        "--lengths",
        metavar="MEAN|FILE",
        help="Of sequences that are packed: their mean in tokens, or a file of lengths. Attention is priced by them.",
        show_default=False,
    ),
]
MemoryOption = Annotated[
    float | None,
    typer.Option("--memory-gib", callback=finite, metavar="GIB", help="Of each device. Without: the job's, else the cluster's."),
]
HostMemoryOption = Annotated[
    float | None,
    typer.Option("--host-memory-gib", callback=finite, metavar="GIB", help="Of each node's host. Without: the cluster's."),
]
OffloadOption = Annotated[
    str | None,
    typer.Option(
        "--offload-ratio", metavar="RATIO", help="Of activations to the host: in [0, 1], or auto. Instead of the job's."
    ),
]
ShareOption = Annotated[
    float | None,
    typer.Option(
        "--memory-share",
        min=0.01,
        max=1.0,
        metavar="SHARE",
        help="Of each device's memory, what training may take.",
    ),
]


HoldOption = Annotated[
    float | None,
    typer.Option(
        "--experts-hold",
        callback=finite,
        metavar="LOAD",
        help="The bytes hold where one rank's experts get so many times a balanced share of the tokens.",
    ),
]
LoadOption = Annotated[
    float | None,
    typer.Option(
        "--experts-load",
        callback=finite,
        metavar="LOAD",
        help="The fullest rank's experts get so many times a balanced share of the tokens: seconds and bytes. Below 1 where "
        "tokens are dropped.",
    ),
]


def expert_changes(load: float | None, hold: float | None) -> dict[str, object]:
    """Values of a job's experts, by their place. A load replaces the `holds` of a launch."""
    said: dict[str, object] = {} if hold is None else {"model.experts.holds": hold}
    return said if load is None else {"model.experts.load": load, "model.experts.holds": hold}


def budget_changes(
    memory_gib: float | None, share: float | None, offload_ratio: str | None = None, host_memory_gib: float | None = None
) -> dict[str, object]:
    """Values of a job's budget, by their place."""
    if memory_gib is not None and share is not None:
        raise typer.BadParameter("found --memory-gib, too: needed one of the two", param_hint="--memory-share")
    ratio = None if offload_ratio is None else number_or_word(offload_ratio)
    said = {
        "budget.memory_gib": memory_gib,
        "budget.share": share,
        "offload_ratio": ratio,
        "cluster.node.host_memory_gib": host_memory_gib,
    }
    return {place: value for place, value in said.items() if value is not None}
