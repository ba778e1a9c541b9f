"""Reads jobs, profiles, plans and outcomes of runs, and measures a profile on this machine if none is given."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_lynx.cli.terminal import announced, say
from megatron_lynx.errors import ConfigError, LynxError, Problem

if TYPE_CHECKING:
    from megatron_lynx.config import Job
    from megatron_lynx.config.cluster import HostTime
    from megatron_lynx.doctor import Unmeasured
    from megatron_lynx.from_run import Lesson
    from megatron_lynx.launch_arguments.given import Given
    from megatron_lynx.measure.run_outcome import RunOutcome
    from megatron_lynx.plan import Plan
    from megatron_lynx.profiler.profile import Profile
    from megatron_lynx.testbed.ranks import Hosts


def job_named(name: str, changes: Mapping[str, Any] | None = None) -> Job:
    from megatron_lynx.config import load_job
    from megatron_lynx.launch_arguments.expert_facts import EXPERTS, without_experts

    asked = changes or {}
    changes_without_experts = {place: value for place, value in asked.items() if not place.startswith(EXPERTS)}
    job = load_job(name, changes_without_experts)
    if changes_without_experts != asked:
        if job.model.experts is None:
            raise ConfigError(f"{name} has no experts", [*without_experts(asked, "a job with model.experts")])
        job = load_job(name, changes)
    mention_experts(job)
    return job


def mention_experts(job: Job, given: Given | None = None) -> None:
    """Print the assumed load of experts. `given`: of a launch, whose router may not be balanced."""
    from megatron_lynx.launch_arguments.expert_facts import natural_routing, routes_naturally

    experts = job.model.experts
    if experts is None:
        return
    layers = ", ".join(map(str, job.model.moe_layers))
    load, held = experts.load, job.model.moe_load
    bytes_for = f"; bytes are counted for {held:g} times (model.experts.holds)" if held != load else ""
    brought = f"tokens by {experts.dispatcher}; " if job.parallel.expert * job.parallel.expert_tensor_size > 1 else ""
    text = f"{brought}the fullest rank's get {load:g} times a balanced share of the tokens (model.experts.load){bytes_for}"
    say(f"experts in layers {layers}: {text}", err=True)
    if given is not None and routes_naturally(given):
        say("\n".join(natural_routing(experts)), err=True)


def job_path(name: str) -> Path:
    from megatron_lynx.config import loader

    return loader.job_path(name)


def named_in(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def whole_numbers_in(text: str, option: str) -> list[int]:
    """The numbers in a comma-separated list. Raises `ConfigError` for other text."""
    if strange := [name for name in named_in(text) if not name.isdecimal()]:
        raise ConfigError("this option does not read", [Problem(option, repr(strange[0]), "whole numbers, with commas")])
    return [int(name) for name in named_in(text)]


def lengths_of(text: str) -> dict[str, float]:
    """The value of `--lengths`: a mean, or a file of lengths. Raises `ConfigError` for an unreadable file."""
    try:
        return {"mean": float(text)}
    except ValueError:
        from megatron_lynx.config.loader import lengths_in

        return lengths_in(Path(text))


def known_costs(job: Job | None, profile: Profile | None) -> Profile | None:
    """A profile, with the links of the job's cluster if that is described; else its figures. Measures nothing."""
    from megatron_lynx.profiler.analytic import analytic_profile, on_cluster

    if profile is not None and profile.source.caution is not None:
        say(f"warning: {profile.source.caution}", err=True)
    if job is None or job.cluster.matmul is None:
        return profile
    if profile is not None:
        return on_cluster(profile, job)
    say(f"nothing is measured: seconds are from the figures of {job.cluster.name}", err=True)
    return analytic_profile(job)


def costs_of(job: Job, profile_file: Path | None) -> Profile:
    """Seconds and bytes of a job's layers and links, measured here if they are not known."""
    from megatron_lynx.profiler.profile import load_profile

    if (known := known_costs(job, None if profile_file is None else load_profile(profile_file))) is not None:
        return known
    with hosts_of(job) as hosts:
        return measured_here(job, hosts)


def figures_for(plan: Plan, profile_file: Path | None, job: Job | None) -> Profile:
    """Figures to simulate a plan with, from a profile or a described cluster, corrected by earlier runs. Measures nothing."""
    from megatron_lynx.profiler.profile import as_learned, load_profile

    if (known := known_costs(job, None if profile_file is None else load_profile(profile_file))) is None:
        needed = "a profile of the plan's job, or --job, whose cluster has figures"
        raise ConfigError("there are no figures to simulate with", [Problem("--profile", "none", needed)])
    return as_learned(known, plan.provenance.learned)


@contextmanager
def hosts_of(job: Job) -> Iterator[Hosts]:
    from megatron_lynx.testbed.ranks import hosts_for

    with hosts_for(job) as hosts:
        say(f"{hosts.ranks} {'rank' if hosts.ranks == 1 else 'ranks'} on this machine: {hosts.description}", err=True)
        yield hosts


def measured_here(job: Job, hosts: Hosts) -> Profile:
    from megatron_lynx.testbed.profiling import measure_profile

    measured = measure_profile(job, hosts, announced)
    if measured.source.caution is not None:
        say(f"warning: {measured.source.caution}", err=True)
    return measured


def host_time_here(words: list[str]) -> HostTime | Unmeasured:
    """Measure host time of a layer for some seconds: Transformer Engine's if it can run and the launch uses it, else Megatron's.

    Raises `ConfigError` for words that are no launch.
    """
    from megatron_lynx.doctor import Unmeasured
    from megatron_lynx.launch_arguments import read_launch

    own_layers = bool(words) and read_launch(words).given["transformer_impl"] == "local"

    try:
        from megatron_lynx.testbed.host_time import Asked, measured_here
        from megatron_lynx.testbed.ranks import RankError
        from megatron_lynx.testbed.stand_in import has_compiled_extension

        import_module("megatron.core")
    except ImportError as error:
        return Unmeasured(f"megatron-core cannot be imported ({error})")
    try:
        return measured_here(Asked("transformer_engine" if has_compiled_extension() and not own_layers else "local", rounds=4))
    except (LynxError, RankError, TimeoutError) as error:
        return Unmeasured(str(error).strip().splitlines()[-1])


def plan_for(job: Job, hosts: Hosts, plan_file: Path | None, profile_file: Path | None, folder: Path) -> Plan:
    from megatron_lynx.plan import save_plan
    from megatron_lynx.planner import make_plan
    from megatron_lynx.profiler.profile import load_profile, save_profile

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
    """The given plan, or a new one by `make`, and the costs with the plan's corrections. Both are saved."""
    from megatron_lynx.plan import save_plan
    from megatron_lynx.planner import make_plan
    from megatron_lynx.profiler.profile import as_learned, save_profile

    given = None if plan_file is None else _given(job, plan_file)
    costs = costs_of(job, profile_file)
    save_profile(costs, folder / "profile.yaml")
    made = (make or make_plan)(job, costs) if given is None else given
    save_plan(made, folder / "plan.yaml")
    return made, as_learned(costs, made.provenance.learned)


def _given(job: Job, plan_file: Path) -> Plan:
    """The plan of a file, refused if it was made for another job."""
    from megatron_lynx.plan import load_plan
    from megatron_lynx.planner import as_planned
    from megatron_lynx.planner.checks import check_plan

    plan = load_plan(plan_file)
    check_plan(as_planned(job, plan) if job.cluster.device == "cuda" else job, plan)
    return plan


def taught(job: Job, profile_file: Path | None, run_file: Path | None) -> tuple[Job, Profile, Lesson | None]:
    """The job and its costs, corrected by a run if one is given."""
    from megatron_lynx.from_run import lesson
    from megatron_lynx.measure.run_outcome import load_outcome

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
    from megatron_lynx.plan import load_plan

    for path in (Path(outcome.plan), run_file.with_name(Path(outcome.plan).name)):
        try:
            plan = load_plan(path)
        except LynxError:
            continue
        if plan.digest == outcome.plan_digest:
            return plan
    return None
