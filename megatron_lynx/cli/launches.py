"""The subject of a command: a job, a launch with its cluster, or a model; and the launch under a plan.

megatron-lynx plan jobs/demo                                       a job file, or a bundled one
megatron-lynx plan --cluster h100-80g -- torchrun ...              a launch
megatron-lynx plan --launch-file FILE                              the same, one word a line; its header may name the cluster
megatron-lynx plan --cluster h100-80g --bridge module:recipe       a configuration of Megatron-Bridge
megatron-lynx estimate --cluster h100 --gpus 64 --model llama3-70b     a model, in the smallest layout that fits
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from typer.core import TyperGroup
from typer.main import get_command

from megatron_lynx.cli.app import app
from megatron_lynx.cli.terminal import say, show, show_lines

if TYPE_CHECKING:
    from megatron_lynx.config import Job
    from megatron_lynx.launch_arguments import Reading
    from megatron_lynx.launch_arguments.today import Today
    from megatron_lynx.plan import Plan

UNCLEAR = "it is not clear what is asked"


@dataclass(frozen=True)
class Asked:
    """The subject of a command."""

    words: tuple[str, ...]
    cluster: str | None = None
    gpus: int | None = None
    strict: bool = False
    """Whether unknown flags are refused."""
    model: str | None = None
    """A model's name or file, instead of a job or launch."""

    @property
    def is_launch(self) -> bool:
        """Whether it is a launch, which needs a cluster, and not a job file."""
        return self.cluster is not None and self.model is None

    @property
    def job_file(self) -> Path | None:
        from megatron_lynx.config.loader import job_path

        return None if self.is_launch or self.model is not None else job_path(self.words[0])

    def again(self, more: Mapping[str, object | None]) -> str:
        """Shell words for the same subject. `more`: options with their values."""
        given = {"--model": self.model, "--cluster": self.cluster, "--gpus": self.gpus, **more}
        options = [word for name, value in given.items() if value is not None for word in (name, _written(value))]
        return shlex.join([*options, *(["--"] if self.is_launch else []), *self.words])


def _written(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value.value if isinstance(value, Enum) else value)


def asked_about(
    words: list[str] | None,
    cluster: str | None,
    gpus: int | None = None,
    launch_file: Path | None = None,
    *,
    strict: bool = False,
    bridge: str | None = None,
    model: str | None = None,
) -> Asked:
    """Read the subject. Raises `ConfigError` with all problems if it is unclear."""
    from megatron_lynx.errors import ConfigError
    from megatron_lynx.launch_arguments.files import read_launch_file

    words = words or []
    if bridge is not None:
        from megatron_lynx.launch_arguments.container import OPTION as CONTAINER

        words = [CONTAINER, bridge, *words]
    if launch_file is None:
        asked = Asked(tuple(words), cluster, gpus, strict, model)
    elif words:
        raise ConfigError(UNCLEAR, [_both(launch_file, words)])
    else:
        file = read_launch_file(launch_file)
        if cluster is None and file.cluster is not None:
            say(f"cluster {file.cluster}, as {launch_file} says", err=True)
        asked = Asked(file.words, cluster or file.cluster, gpus, strict, model)
    if problems := _unclear(asked, launch_file):
        raise ConfigError(UNCLEAR, problems)
    return asked


def _both(launch_file: Path, words: list[str]) -> Any:
    from megatron_lynx.errors import Problem

    return Problem(f"--launch-file {launch_file}", f"also {words[0]!r}", "a file, or a launch behind --, not both")


def _unclear(asked: Asked, launch_file: Path | None) -> list[Any]:
    """Problems of the subject; for a launch without a cluster also the launch's own."""
    from megatron_lynx.config.loader import bundled_configs
    from megatron_lynx.errors import ConfigError, Problem
    from megatron_lynx.launch_arguments import read_launch

    if asked.model is not None:
        return list(_unclear_model(asked))
    if asked.is_launch:
        return [] if asked.words else [Problem("LAUNCH", "nothing", "a launch after --, or --launch-file FILE")]
    if not asked.words:
        return [Problem("JOB", "nothing", "a job file, or --cluster C -- LAUNCH")]
    if launch_file is not None or any(word.startswith("--") or word.endswith(".py") for word in asked.words):
        known = ", ".join(sorted(path.stem for path in (bundled_configs() / "clusters").glob("*.yaml")))
        needed = f"where the launch is to run: {known}, or a file"
        found: list[Any] = [Problem("--cluster", "nothing", needed, "megatron-lynx COMMAND --cluster h100-80g -- LAUNCH")]
        try:
            return [*found, *read_launch(asked.words, gpus=asked.gpus, strict=asked.strict).problems]
        except ConfigError as error:
            return [*found, *error.problems]
    problems = [Problem(word, "a second job", "one job, or --cluster C before a launch") for word in asked.words[1:2]]
    if asked.gpus is not None:
        problems.append(Problem("--gpus", str(asked.gpus), "a launch: with a job file, its own figure counts"))
    return problems


def _unclear_model(asked: Asked) -> Iterator[Any]:
    from megatron_lynx.errors import Problem

    if asked.words:
        yield Problem("--model", f"also {asked.words[0]!r}", "a model, or a job or a launch, not both")
    if asked.cluster is None:
        yield Problem("--cluster", "nothing", "where the model is to be trained: h100, or a file")
    if asked.gpus is None:
        yield Problem("--gpus", "nothing", "on how many of its GPUs")


def job_or_launch(asked: Asked, *, planning: bool, changes: Mapping[str, Any] | None = None) -> tuple[Job, Reading | None]:
    """The job, and for a launch how it was read. Warns of unknown flags."""
    from megatron_lynx.cli.inputs import job_named
    from megatron_lynx.launch_arguments import job_of, read_launch

    if asked.model is not None:
        return job_of_model(asked, changes or {}, planning=planning), None
    if asked.cluster is None:
        return job_named(asked.words[0], changes), None
    reading = read_launch(asked.words, gpus=asked.gpus, planning=planning, strict=asked.strict)
    job = job_of(reading, asked.cluster, changes or {})
    warn_of_reading(reading, job)
    return job, reading


def job_of_model(asked: Asked, changes: Mapping[str, Any], *, planning: bool) -> Job:
    """A job of a model. Chooses a layout and a batch, and prints them."""
    from megatron_lynx.cli.inputs import mention_experts
    from megatron_lynx.config import Job
    from megatron_lynx.config.loader import load_cluster, load_model, override
    from megatron_lynx.search.candidate import in_words
    from megatron_lynx.search.smallest import batch_of, smallest_layout
    from megatron_lynx.validation import validated

    model, cluster = load_model(str(asked.model), "--model"), load_cluster(str(asked.cluster), "--cluster")
    gpus = asked.gpus or 1
    own = model.model_dump(mode="json", exclude_unset=True)
    engine = {} if cluster.device == "cpu" else {"implementation": "transformer_engine"}
    data: dict[str, Any] = {
        "model": {**engine, **own},
        "cluster": cluster.model_dump(mode="json"),
        "gpus": gpus,
        "parallel": {"distributed_optimizer": True, "expert": gcd(model.experts.count if model.experts else 1, gpus)},
        "batch": {"micro": 1, "global": batch_of(model.seq, gpus)},
        "policy": "none",
    }
    override(data, changes)
    job = smallest_layout(validated(Job, data, "--model"))
    batch = f"batches of {job.batch.global_} sequences of {model.seq} tokens"
    say(f"{in_words(job)}: the smallest layout that fits; {batch}. A job file or a launch says otherwise", err=True)
    mention_experts(job)
    return job.model_copy(update={"policy": "planned"}) if planning else job


def show_understood(reading: Reading) -> None:
    """Print the values of the job with their origins, substitutes, and flags that do not matter."""
    from megatron_lynx.launch_arguments.table import remarks, understood

    show(understood(reading))
    show_lines(*remarks(reading))


def priceable(reading: Reading) -> Today:
    """The launch's present setting. Raises `ConfigError` if it cannot be priced."""
    from megatron_lynx.errors import ConfigError, Problem

    if reading.today.not_priced:
        problems = [Problem("today", why, "", "plan, or price the launch without it") for why in reading.today.not_priced]
        raise ConfigError("what this launch does today cannot be priced", problems)
    return reading.today


def warn_of_reading(reading: Reading, job: Job) -> None:
    """Warn of unknown flags, costly defaults, assumed loads of experts, and the loss of reinforcement learning."""
    from megatron_lynx.cli.inputs import mention_experts
    from megatron_lynx.cost.ends import log_probabilities_bytes, logits_at_loss_bytes
    from megatron_lynx.launch_arguments.parallel_facts import learns_from_rollouts
    from megatron_lynx.launch_arguments.table import unknown_in_words, unsaid
    from megatron_lynx.profiler.shape import LayerShape
    from megatron_lynx.units import format_bytes

    for line in (unknown_in_words(reading), *unsaid(reading)):
        if line is not None:
            say(f"warning: {line}", err=True)
    for option in _misplaced(reading):
        say(f"warning: {option} is an option of megatron-lynx, and was not read: give it before --", err=True)
    mention_experts(job, reading.given)
    if learns_from_rollouts(reading.given):
        shape = LayerShape.of(job)
        found, counted = (format_bytes(count(shape)) for count in (log_probabilities_bytes, logits_at_loss_bytes))
        say("warning: log-probabilities and entropy in fp32 are not counted: the last stage", err=True)
        say(f"  may hold {found} of logits in its loss, of which {counted} are. --memory-gib leaves room.", err=True)


def _misplaced(reading: Reading) -> Iterator[str]:
    """Our own options among the unknown flags of a launch."""
    commands = cast("TyperGroup", get_command(app)).commands.values()
    own = {name for command in commands for parameter in command.params for name in parameter.opts}
    yield from dict.fromkeys(option for words in reading.given.unknown if (option := words.split()[0].partition("=")[0]) in own)


def understood_as_json(reading: Reading | None) -> dict[str, object]:
    from megatron_lynx.launch_arguments.table import as_json

    return {} if reading is None else {"understood": as_json(reading)}


def command_with(
    reading: Reading, job: Job, made: Plan, path: Path, more: Sequence[str] = (), without: Collection[str] = ()
) -> str:
    """The launch under the plan. Layer flags are added only if the launch left the partition open.

    `more`: further flags; Megatron uses the last of several. `without`: names of arguments to drop.
    """
    from megatron_lynx.launch_arguments.command_line import LAUNCHER, TESTBED
    from megatron_lynx.plan.layout import layer_flags, schedule_flags
    from megatron_lynx.planner.summary import job_environment

    counted = reading.container is not None
    layers = layer_flags(made, chunks_counted=counted) if job.parallel.partition == "auto" else ()
    said = {word.partition("=")[0] for word in reading.command.arguments}
    schedule = (flag for flag in schedule_flags(made) if flag.split()[0] not in said)
    reading = reading.with_graphs_of(made.model.captured)
    runner = TESTBED if job.cluster.device == "cpu" else LAUNCHER
    return reading.under_plan(os.fspath(path), [*layers, *schedule, *more], job_environment(job, made), without, runner)
