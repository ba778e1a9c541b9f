"""Plans with what a run has taught: `plan --from-run lynx_outcome.json`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_lynx.cli.inputs import costs_of

if TYPE_CHECKING:
    from megatron_lynx.config import Job
    from megatron_lynx.from_run import Lesson
    from megatron_lynx.measure.run_outcome import RunOutcome
    from megatron_lynx.plan import Plan
    from megatron_lynx.profiler.profile import Profile


def taught(job: Job, profile_file: Path | None, run_file: Path | None) -> tuple[Job, Profile, Lesson | None]:
    """The job and its costs with what a run has taught, if one is given; without one as ever."""
    from megatron_lynx.errors import ConfigError, Problem
    from megatron_lynx.from_run import lesson
    from megatron_lynx.measure.run_outcome import load_outcome

    if run_file is None:
        return job, costs_of(job, profile_file), None
    outcome = load_outcome(run_file)
    if profile_file is None and job.cluster.matmul is None:
        needed = f"the profile that {outcome.plan} was made with: one that is measured now has other seconds"
        raise ConfigError("a run corrects the figures of its own plan", [Problem("--profile", "nothing", needed)])
    costs = costs_of(job, profile_file)
    found = lesson(outcome, job, costs, os.fspath(run_file), _plan_of(outcome, run_file))
    return found.job(job), found.costs(costs), found


def _plan_of(outcome: RunOutcome, run_file: Path) -> Plan | None:
    """The plan that a run was made under: where its launch had it, or beside the outcome. None where it is not there."""
    from megatron_lynx.errors import LynxError
    from megatron_lynx.plan import load_plan

    for path in (Path(outcome.plan), run_file.with_name(Path(outcome.plan).name)):
        try:
            plan = load_plan(path)
        except LynxError:
            continue
        if plan.digest == outcome.plan_digest:
            return plan
    return None
