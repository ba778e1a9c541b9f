"""Reads a command's subject (a job, a launch with its cluster, or a model), profiles, plans and outcomes of runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from typer.core import TyperGroup
from typer.main import get_command

from megatron_lynx.cli.app import app
from megatron_lynx.cli.options import Subject
from megatron_lynx.cli.terminal import announced, say, show, show_lines
from megatron_lynx.config import Job, load_job
from megatron_lynx.config.loader import bundled_configs, lengths_in, load_cluster, load_model, override
from megatron_lynx.cost.ends import logits_at_loss_bytes
from megatron_lynx.errors import ConfigError, LynxError, Problem
from megatron_lynx.from_run import Lesson, lesson
from megatron_lynx.launch_arguments import Reading, job_of, read_launch
from megatron_lynx.launch_arguments.command_line import LAUNCHER, TESTBED, read_launch_file
from megatron_lynx.launch_arguments.container import OPTION as CONTAINER
from megatron_lynx.launch_arguments.expert_facts import EXPERTS, natural_routing, without_experts
from megatron_lynx.launch_arguments.given import Given
from megatron_lynx.launch_arguments.hf_config import OPTION as SHAPES
from megatron_lynx.launch_arguments.reading import as_json, remarks, understood, unknown_in_words, unsaid
from megatron_lynx.measure.run_outcome import RunOutcome, load_outcome
from megatron_lynx.plan import Plan, load_plan, save_plan
from megatron_lynx.plan.layout import layer_flags, schedule_flags
from megatron_lynx.planner import as_planned, make_plan
from megatron_lynx.planner.checks import check_plan
from megatron_lynx.planner.summary import job_environment
from megatron_lynx.prediction import precision
from megatron_lynx.profiler.analytic import analytic_profile, on_cluster
from megatron_lynx.profiler.profile import Profile, as_learned, load_profile, save_profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.search.best_first import in_words
from megatron_lynx.search.search import batch_of, smallest_layout
from megatron_lynx.units import format_bytes
from megatron_lynx.validation import validated

if TYPE_CHECKING:
    from megatron_lynx.testbed.ranks import Hosts


def job_named(name: str, changes: Mapping[str, Any] | None = None) -> Job:
    asked = changes or {}
    changes_without_experts = {place: value for place, value in asked.items() if not place.startswith(EXPERTS)}
    job = load_job(name, changes_without_experts)
    if changes_without_experts != asked:
        if job.model.experts is None:
            raise ConfigError(f"{name} has no experts", [*without_experts(asked, "a job with model.experts")])
        job = load_job(name, changes)
    mention_assumed(job)
    return job


def mention_assumed(job: Job, given: Given | None = None) -> None:
    """Print the assumed links, how far such steps are off, and the load of experts."""
    if (links := job.cluster.links_in_words) is not None:
        say(f"{links}\n{precision(experts=job.model.experts is not None).in_words}", err=True)
    experts = job.model.experts
    if experts is None:
        return
    layers = ", ".join(map(str, job.model.moe_layers))
    load, held = experts.load, job.model.moe_load
    bytes_for = f"; bytes are counted for {held:g} times (model.experts.holds)" if held != load else ""
    brought = f"tokens by {experts.dispatcher}; " if job.parallel.expert * job.parallel.expert_tensor_size > 1 else ""
    text = f"{brought}the fullest rank's get {load:g} times a balanced share of the tokens (model.experts.load){bytes_for}"
    say(f"experts in layers {layers}: {text}", err=True)
    for line in () if given is None else natural_routing(given, experts):
        say(line, err=True)


def named_in(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def whole_numbers_in(text: str, option: str) -> list[int]:
    if strange := [name for name in named_in(text) if not name.isdecimal()]:
        raise ConfigError("this option does not read", [Problem(option, repr(strange[0]), "whole numbers, with commas")])
    return [int(name) for name in named_in(text)]


def lengths_of(text: str) -> dict[str, float]:
    """The value of `--lengths`: a mean, or a file of lengths. Raises `ConfigError` for an unreadable file."""
    try:
        mean = float(text)
    except ValueError:
        if Path(text).exists():
            return lengths_in(Path(text))
        mean = 0.0
    if not 0 < mean < float("inf"):
        needed = "the mean length in tokens, above 0, or a file of lengths"
        raise ConfigError("the lengths cannot be read", [Problem("--lengths", repr(text), needed)])
    return {"mean": mean}


def known_costs(job: Job | None, profile: Profile | None) -> Profile | None:
    """A profile, with the links of the job's cluster if that is described; else its figures. Measures nothing."""
    if profile is not None and profile.source.caution is not None:
        say(f"warning: {profile.source.caution}", err=True)
    if job is None or job.cluster.matmul is None:
        return profile
    if profile is not None:
        return on_cluster(profile, job)
    say(f"nothing is measured: seconds are from the figures of {job.cluster.name}", err=True)
    return analytic_profile(job)


def costs_of(job: Job, profile_file: Path | None) -> Profile:
    if (known := known_costs(job, None if profile_file is None else load_profile(profile_file))) is not None:
        return known
    return measured_here(job, hosts_of(job))


def figures_for(plan: Plan, profile_file: Path | None, job: Job | None) -> Profile:
    """Figures to simulate a plan with, from a profile or a described cluster, corrected by earlier runs. Measures nothing."""
    if (known := known_costs(job, None if profile_file is None else load_profile(profile_file))) is None:
        needed = "a profile of the plan's job, or --job, whose cluster has figures"
        raise ConfigError("there are no figures to simulate with", [Problem("--profile", "none", needed)])
    return as_learned(known, plan.provenance.learned)


def hosts_of(job: Job) -> Hosts:
    from megatron_lynx.testbed.ranks import hosts_for

    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # a rank that is gone is an error, and does not end this process
    hosts = hosts_for(job)
    say(f"{hosts.ranks} {'rank' if hosts.ranks == 1 else 'ranks'} on this machine: {hosts.description}", err=True)
    return hosts


def measured_here(job: Job, hosts: Hosts) -> Profile:
    from megatron_lynx.testbed.profiling import measure_profile

    measured = measure_profile(job, hosts, announced)
    if measured.source.caution is not None:
        say(f"warning: {measured.source.caution}", err=True)
    return measured


def plan_for(job: Job, hosts: Hosts, plan_file: Path | None, profile_file: Path | None, folder: Path) -> Plan:
    if plan_file is not None:
        return _given(job, plan_file)
    costs = load_profile(profile_file) if profile_file is not None else measured_here(job, hosts)
    save_profile(costs, folder / "profile.yaml")
    made = make_plan(job, costs)
    save_plan(made, folder / "plan.yaml")
    return made


def plan_and_costs(
    job: Job,
    plan_file: Path | None,
    profile_file: Path | None,
    folder: Path,
    *,
    make: Callable[[Job, Profile], Plan] | None = None,
) -> tuple[Plan, Profile]:
    given = None if plan_file is None else _given(job, plan_file)
    costs = costs_of(job, profile_file)
    save_profile(costs, folder / "profile.yaml")
    made = (make or make_plan)(job, costs) if given is None else given
    save_plan(made, folder / "plan.yaml")
    return made, as_learned(costs, made.provenance.learned)


def _given(job: Job, plan_file: Path) -> Plan:
    plan = load_plan(plan_file)
    check_plan(as_planned(job, plan) if job.cluster.device == "cuda" else job, plan)
    return plan


def taught(job: Job, profile_file: Path | None, run_file: Path | None) -> tuple[Job, Profile, Lesson | None]:
    if run_file is None:
        return job, costs_of(job, profile_file), None
    outcome = load_outcome(run_file)
    if profile_file is None and job.cluster.matmul is None:
        needed = f"the profile that {outcome.plan} was made with: one that is measured now has other seconds"
        raise ConfigError("a run corrects the figures of its own plan", [Problem("--profile", "nothing", needed)])
    costs = costs_of(job, profile_file)
    corrections = lesson(outcome, job, costs, os.fspath(run_file), _plan_of(outcome, run_file))
    return corrections.job(job), corrections.costs(costs), corrections


def _plan_of(outcome: RunOutcome, run_file: Path) -> Plan | None:
    """The plan of a run, from its original path or next to the outcome; None if it is missing or has changed."""
    for path in (Path(outcome.plan), run_file.with_name(Path(outcome.plan).name)):
        try:
            plan = load_plan(path)
        except LynxError:
            continue
        if plan.digest == outcome.plan_digest:
            return plan
    return None


def asked_about(subject: Subject) -> Subject:
    """The subject with all its words, those of a file or a container included. Raises `ConfigError` if it is unclear."""
    words, cluster, file = subject.words or [], subject.cluster, subject.launch_file
    if subject.bridge is not None:
        words = [CONTAINER, subject.bridge, *words]
    if file is not None and words:
        problems = [Problem(f"--launch-file {file}", f"also {words[0]!r}", "a file, or a launch behind --, not both")]
    else:
        if file is not None:
            read = read_launch_file(file)
            if cluster is None and read.cluster is not None:
                say(f"cluster {read.cluster}, as {'standard input' if str(file) == '-' else file} says", err=True)
            words, cluster = [*read.words], cluster or read.cluster
        if subject.hf_config is not None:
            words = [SHAPES, os.fspath(subject.hf_config), *words]
        subject = replace(subject, words=words, cluster=cluster, bridge=None, hf_config=None)
        problems = list(_unclear(subject, words)) or list(_without_link(subject, words))
    if problems:
        raise ConfigError("it is not clear what is asked", problems)
    return subject


def _unclear(subject: Subject, words: Sequence[str]) -> Iterator[Problem]:
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


def _without_link(subject: Subject, words: Sequence[str]) -> Iterator[Problem]:
    given = {"nic": ("--nic-gbit", subject.nic_gbit), "nvlink": ("--nvlink-gb-s", subject.nvlink_gb_s)}
    if all(rate is None for _, rate in given.values()):
        return
    cluster = load_job(words[0]).cluster if subject.cluster is None else load_cluster(subject.cluster, "--cluster")
    for link, (option, rate) in given.items():
        if rate is not None and getattr(cluster, link) is None:
            yield Problem(
                option, f"{rate:g}, and no {link} in cluster {cluster.name}", "a cluster with this link", "leave it out"
            )


def job_or_launch(asked: Subject, changes: Mapping[str, Any], *, planning: bool) -> tuple[Job, Reading | None]:
    words, changes = asked.words or [], {**asked.machine_changes, **changes}
    if asked.model is not None:
        return job_of_model(asked, changes, planning=planning), None
    if asked.cluster is None:
        return job_named(words[0], changes), None
    reading = read_launch(words, gpus=asked.gpus, planning=planning, strict=asked.strict)
    job = job_of(reading, asked.cluster, changes)
    warn_of_reading(reading, job)
    return job, reading


def job_of_model(asked: Subject, changes: Mapping[str, Any], *, planning: bool) -> Job:
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
    mention_assumed(job)
    return job.model_copy(update={"policy": "planned"}) if planning else job


def show_understood(reading: Reading) -> None:
    show(understood(reading))
    show_lines(*remarks(reading))


def warn_of_reading(reading: Reading, job: Job) -> None:
    for line in (unknown_in_words(reading), *unsaid(reading)):
        if line is not None:
            say(f"warning: {line}", err=True)
    commands = cast("TyperGroup", get_command(app)).commands.values()
    our_options = {name for command in commands for parameter in command.params for name in parameter.opts}
    for option in dict.fromkeys(words.split()[0].partition("=")[0] for words in reading.given.unknown):
        if option in our_options:
            say(f"warning: {option} is an option of megatron-lynx, and was not read: give it before --", err=True)
    mention_assumed(job, reading.given)
    if reading.learns:
        shape = LayerShape.of(job)
        say("warning: the loss of this trainer is not known, and was counted as Megatron's: copies of logits", err=True)
        say(f"  that it keeps besides {format_bytes(logits_at_loss_bytes(shape))} are not. --memory-gib leaves room.", err=True)


def understood_as_json(reading: Reading | None) -> dict[str, object]:
    return {} if reading is None else {"understood": as_json(reading)}


def command_with(
    reading: Reading, job: Job, made: Plan, path: Path, more: Sequence[str] = (), without: Collection[str] = ()
) -> str:
    counted = reading.container is not None
    layers = layer_flags(made, chunks_counted=counted) if job.parallel.partition == "auto" else ()
    said = {word.partition("=")[0] for word in reading.command.arguments}
    schedule = (flag for flag in schedule_flags(made) if flag.split()[0] not in said)
    reading = reading.with_graphs_of(made.model.captured)
    runner = TESTBED if job.cluster.device == "cpu" else LAUNCHER
    return reading.under_plan(os.fspath(path), [*layers, *schedule, *more], job_environment(job, made), without, runner)
