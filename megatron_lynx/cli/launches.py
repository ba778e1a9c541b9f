"""The subject of a command: a job, a launch with its cluster, or a model; and the launch under a plan.

megatron-lynx plan jobs/demo                                       a job file, or a bundled one
megatron-lynx plan --cluster h100-80g -- torchrun ...              a launch
megatron-lynx plan --launch-file FILE                              the same, one word a line; its header may name the cluster
megatron-lynx plan --cluster h100-80g --bridge module:recipe       a configuration of Megatron-Bridge
megatron-lynx estimate --cluster h100 --gpus 64 --model llama3-70b     a model, in the smallest layout that fits
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from typer.core import TyperGroup
from typer.main import get_command

from megatron_lynx.cli.app import app
from megatron_lynx.cli.inputs import job_named, mention_experts
from megatron_lynx.cli.options import Subject
from megatron_lynx.cli.terminal import say, show, show_lines
from megatron_lynx.errors import ConfigError, Problem

if TYPE_CHECKING:
    from megatron_lynx.config import Job
    from megatron_lynx.launch_arguments import Reading
    from megatron_lynx.plan import Plan


def asked_about(subject: Subject) -> Subject:
    """The subject with all its words, those of a file or a container included. Raises `ConfigError` if it is unclear."""
    from megatron_lynx.launch_arguments.command_line import read_launch_file
    from megatron_lynx.launch_arguments.container import OPTION as CONTAINER

    words, cluster, file = subject.words or [], subject.cluster, subject.launch_file
    if subject.bridge is not None:
        words = [CONTAINER, subject.bridge, *words]
    if file is not None and words:
        problems = [Problem(f"--launch-file {file}", f"also {words[0]!r}", "a file, or a launch behind --, not both")]
    else:
        if file is not None:
            read = read_launch_file(file)
            if cluster is None and read.cluster is not None:
                say(f"cluster {read.cluster}, as {file} says", err=True)
            words, cluster = [*read.words], cluster or read.cluster
        subject = replace(subject, words=words, cluster=cluster, bridge=None)
        problems = list(_unclear(subject, words))
    if problems:
        raise ConfigError("it is not clear what is asked", problems)
    return subject


def _unclear(subject: Subject, words: Sequence[str]) -> Iterator[Problem]:
    """Problems of the subject; for a launch without a cluster also the launch's own."""
    from megatron_lynx.config.loader import bundled_configs
    from megatron_lynx.launch_arguments import read_launch

    if subject.model is not None:
        if words:
            yield Problem("--model", f"also {words[0]!r}", "a model, or a job or a launch, not both")
        if subject.cluster is None:
            yield Problem("--cluster", "nothing", "where the model is to be trained: h100, or a file")
        if subject.gpus is None:
            yield Problem("--gpus", "nothing", "on how many of its GPUs")
    elif subject.is_launch:
        if not words:
            yield Problem("LAUNCH", "nothing", "a launch after --, or --launch-file FILE")
    elif not words:
        yield Problem("JOB", "nothing", "a job file, or --cluster C -- LAUNCH")
    elif subject.launch_file is not None or any(word.startswith("--") or word.endswith(".py") for word in words):
        known = ", ".join(sorted(path.stem for path in (bundled_configs() / "clusters").glob("*.yaml")))
        needed = f"where the launch is to run: {known}, or a file"
        yield Problem("--cluster", "nothing", needed, "megatron-lynx COMMAND --cluster h100-80g -- LAUNCH")
        try:
            yield from read_launch(words, gpus=subject.gpus, strict=subject.strict).problems
        except ConfigError as error:
            yield from error.problems
    else:
        yield from (Problem(word, "a second job", "one job, or --cluster C before a launch") for word in words[1:2])
        if subject.gpus is not None:
            yield Problem("--gpus", str(subject.gpus), "a launch: with a job file, its own figure counts")


def job_or_launch(asked: Subject, changes: Mapping[str, Any], *, planning: bool) -> tuple[Job, Reading | None]:
    """The job, and for a launch how it was read. Warns of unknown flags."""
    from megatron_lynx.launch_arguments import job_of, read_launch

    words = asked.words or []
    if asked.model is not None:
        return job_of_model(asked, changes, planning=planning), None
    if asked.cluster is None:
        return job_named(words[0], changes), None
    reading = read_launch(words, gpus=asked.gpus, planning=planning, strict=asked.strict)
    job = job_of(reading, asked.cluster, changes)
    warn_of_reading(reading, job)
    return job, reading


def job_of_model(asked: Subject, changes: Mapping[str, Any], *, planning: bool) -> Job:
    """A job of a model. Chooses a layout and a batch, and prints them."""
    from megatron_lynx.config import Job
    from megatron_lynx.config.loader import load_cluster, load_model, override
    from megatron_lynx.search.candidate import in_words
    from megatron_lynx.search.nearest import batch_of, smallest_layout
    from megatron_lynx.validation import validated

    model, cluster = load_model(str(asked.model), "--model"), load_cluster(str(asked.cluster), "--cluster")
    gpus = asked.gpus or 1
    model_fields = model.model_dump(mode="json", exclude_unset=True)
    engine = {} if cluster.device == "cpu" else {"implementation": "transformer_engine"}
    data: dict[str, Any] = {
        "model": {**engine, **model_fields},
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
    from megatron_lynx.launch_arguments.reading import remarks, understood

    show(understood(reading))
    show_lines(*remarks(reading))


def warn_of_reading(reading: Reading, job: Job) -> None:
    """Warn of unknown flags, costly defaults, assumed loads of experts, and the loss of reinforcement learning."""
    from megatron_lynx.cost.ends import log_probabilities_bytes, logits_at_loss_bytes
    from megatron_lynx.launch_arguments.parallel_facts import learns_from_rollouts
    from megatron_lynx.launch_arguments.reading import unknown_in_words, unsaid
    from megatron_lynx.profiler.shape import LayerShape
    from megatron_lynx.units import format_bytes

    for line in (unknown_in_words(reading), *unsaid(reading)):
        if line is not None:
            say(f"warning: {line}", err=True)
    commands = cast("TyperGroup", get_command(app)).commands.values()
    our_options = {name for command in commands for parameter in command.params for name in parameter.opts}
    for option in dict.fromkeys(words.split()[0].partition("=")[0] for words in reading.given.unknown):
        if option in our_options:
            say(f"warning: {option} is an option of megatron-lynx, and was not read: give it before --", err=True)
    mention_experts(job, reading.given)
    if learns_from_rollouts(reading.given):
        shape = LayerShape.of(job)
        held_in_words, counted = (format_bytes(count(shape)) for count in (log_probabilities_bytes, logits_at_loss_bytes))
        say("warning: log-probabilities and entropy in fp32 are not counted: the last stage", err=True)
        say(f"  may hold {held_in_words} of logits in its loss, of which {counted} are. --memory-gib leaves room.", err=True)


def understood_as_json(reading: Reading | None) -> dict[str, object]:
    from megatron_lynx.launch_arguments.reading import as_json

    return {} if reading is None else {"understood": as_json(reading)}


def command_with(
    reading: Reading, job: Job, made: Plan, path: Path, more: Sequence[str] = (), without: Collection[str] = ()
) -> str:
    """The launch under the plan, with the flags of `more` and without the names of `without`."""
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
