"""Options that several commands take. Groups are dataclasses: `app.command` makes each field an option."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, BadParameter, Option


def number_or_word(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def part_or_auto(text: str | None) -> str | None:
    figure = None if text is None else number_or_word(text)
    if figure not in (None, "auto") and not (isinstance(figure, float) and 0 <= figure <= 1):
        raise BadParameter(f"found {text!r}, needed a number in [0, 1], or auto")
    return text


def finite(figure: float | None) -> float | None:
    if figure is not None and not 0 < figure < float("inf"):
        raise BadParameter(f"found {figure}, needed a number above 0")
    return figure


PlanFile = Annotated[Path, Argument(metavar="PLAN", help="A plan file.", show_default=False)]
JobName = Annotated[str, Argument(metavar="JOB", help="A job file, or a bundled one: jobs/demo.", show_default=False)]
ClusterOption = Annotated[str | None, Option(metavar="CLUSTER", help="Cluster of the launch: h100 (h100-80g), or a file.")]
LAUNCH_FILE = "The launch, one word a line, or - for standard input; '# cluster: C' in its header stands for --cluster."
LaunchFileOption = Annotated[Path | None, Option(metavar="FILE", help=LAUNCH_FILE, show_default=False)]
VerboseOption = Annotated[bool, Option("--verbose", "-v", help="Also print how the launch was read, and the work of each stage.")]
LayersOption = Annotated[
    Path | None,
    Option(
        "--profile", metavar="PROFILE", help="Measured layers. Default: the cluster's figures, or, without any, measured here."
    ),
]
ProfileOption = Annotated[Path | None, Option("--profile", metavar="PROFILE", help="Measured layers.", show_default=False)]
JobOption = Annotated[str | None, Option("--job", metavar="JOB", help="The plan's job, if the plan does not name it.")]
AsJson = Annotated[bool, Option("--json", help="Print the answer as JSON, for programs.")]


@dataclass(frozen=True, kw_only=True)
class Subject:
    words: Annotated[
        list[str] | None,
        Argument(
            metavar="JOB | --cluster C -- LAUNCH",
            help="A job file, or a bundled one: jobs/demo. With --cluster: a Megatron launch, as in `-- torchrun ... "
            "pretrain_gpt.py --num-layers 32 ...`, or its arguments alone.",
            show_default=False,
        ),
    ] = None
    cluster: ClusterOption = None
    gpus: Annotated[int | None, Option(metavar="N", min=1, help="GPUs of the launch, if its launcher does not say.")] = None
    bridge: Annotated[
        str | None,
        Option(
            metavar="MODULE:RECIPE|FILE",
            help="Instead of a launch, Megatron-Bridge's ConfigContainer: a function that returns one, or a file. Settings "
            "follow --: model.seq_length=8192.",
            show_default=False,
        ),
    ] = None
    model: Annotated[
        str | None,
        Option(
            metavar="MODEL",
            help="Instead of a job or a launch, with --cluster and --gpus: a catalogued model (llama3-70b), or a file, in the "
            "smallest layout that fits.",
            show_default=False,
        ),
    ] = None
    hf_config: Annotated[
        Path | None,
        Option(
            metavar="PATH",
            help="The model's config.json of Hugging Face, or its folder: shapes that no flag gives.",
            show_default=False,
        ),
    ] = None
    launch_file: LaunchFileOption = None
    nic_gbit: Annotated[
        float | None,
        Option(callback=finite, metavar="GBIT", help="Rate of each NIC of a node, in Gbit/s. Default: the cluster's."),
    ] = None
    nvlink_gb_s: Annotated[
        float | None,
        Option(callback=finite, metavar="GB/S", help="Rate of a GPU's NVLink in one direction. Default: the cluster's."),
    ] = None
    host_cpu: Annotated[
        str | None,
        Option(metavar="CPU", help="CPU whose host time counts: amd-epyc, intel-xeon-h100, or a file. Default: the cluster's."),
    ] = None
    strict: Annotated[bool, Option("--strict", help="Refuse flags that Megatron does not know, instead of a warning.")] = False

    @property
    def machine_changes(self) -> dict[str, object]:
        """Values of a job, by their place. Raises `ConfigError` for an unknown CPU."""
        from megatron_lynx.config.loader import load_host_time

        host_time = None if self.host_cpu is None else load_host_time(self.host_cpu, "--host-cpu")
        said = {
            "cluster.nic.gb_per_s": None if self.nic_gbit is None else self.nic_gbit / 8,
            "cluster.nvlink.gb_per_s": self.nvlink_gb_s,
            "cluster.host_time": None if host_time is None else host_time.model_dump(mode="json", exclude_none=True),
        }
        return {place: value for place, value in said.items() if value is not None}

    @property
    def is_launch(self) -> bool:
        return self.cluster is not None and self.model is None

    @property
    def job_file(self) -> Path | None:
        from megatron_lynx.config.loader import job_path

        return None if self.is_launch or self.model is not None else job_path((self.words or [""])[0])

    def again(self, more: Mapping[str, object | None]) -> str:
        machine = {"--nic-gbit": self.nic_gbit, "--nvlink-gb-s": self.nvlink_gb_s, "--host-cpu": self.host_cpu}
        given = {"--model": self.model, "--cluster": self.cluster, "--gpus": self.gpus, **machine, **more}
        written = {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in given.items()}
        options = [
            word for name, value in given.items() if value is not None for word in (name, written[name])[: 2 - (value is True)]
        ]
        return shlex.join([*options, *(["--"] if self.is_launch else []), *(self.words or [])])


@dataclass(frozen=True, kw_only=True)
class ExpertLoad:
    load: Annotated[
        float | None,
        Option(
            "--experts-load",
            callback=finite,
            metavar="LOAD",
            help="Tokens of the fullest rank's experts, over a balanced share: priced in seconds and bytes. Below 1 if tokens "
            "are dropped.",
        ),
    ] = None
    hold: Annotated[
        float | None,
        Option(
            "--experts-hold",
            callback=finite,
            metavar="LOAD",
            help="As --experts-load, but priced in bytes alone: such a load still fits.",
        ),
    ] = None

    @property
    def changes(self) -> dict[str, object]:
        """Values of a job, by their place. A load replaces the `holds` of a launch."""
        said: dict[str, object] = {} if self.hold is None else {"model.experts.holds": self.hold}
        return said if self.load is None else {"model.experts.load": self.load, "model.experts.holds": self.hold}


@dataclass(frozen=True, kw_only=True)
class Budget(ExpertLoad):
    memory_gib: Annotated[
        float | None, Option(callback=finite, metavar="GIB", help="Memory of each device. Default: the job's or cluster's.")
    ] = None
    share: Annotated[
        float | None, Option("--memory-share", min=0.01, max=1.0, metavar="SHARE", help="Usable share of each device's memory.")
    ] = None
    host_memory_gib: Annotated[
        float | None, Option(callback=finite, metavar="GIB", help="Memory of each node's host. Default: the cluster's.")
    ] = None
    offload_ratio: Annotated[
        str | None,
        Option(
            callback=part_or_auto,
            metavar="RATIO",
            help="Share of activations that go to the host: in [0, 1], or auto. Default: the job's.",
        ),
    ] = None
    whole_weight_gradients: Annotated[
        bool, Option("--whole-weight-gradients", help="Plans cut no delayed weight gradients that are longer than a wait.")
    ] = False

    @property
    def changes(self) -> dict[str, object]:
        if self.memory_gib is not None and self.share is not None:
            raise BadParameter("found --memory-gib, too: needed one of the two", param_hint="--memory-share")
        said = {
            "budget.memory_gib": self.memory_gib,
            "budget.share": self.share,
            "offload_ratio": None if self.offload_ratio is None else number_or_word(self.offload_ratio),
            "cluster.node.host_memory_gib": self.host_memory_gib,
            "overlap.weight_gradient_pieces": False if self.whole_weight_gradients else None,
        }
        return {place: value for place, value in said.items() if value is not None} | super().changes
