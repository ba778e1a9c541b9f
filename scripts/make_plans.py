"""Writes configs/plans/: a plan for every job of configs/jobs/ whose cluster is described, and in configs/plans/launches/ one for
every launch of scripts/launches/ on every cluster it is ready for. A test holds them current.

After a change of figures of models or clusters, costs, the solver, or a launch, look at what becomes of them, then store them:

    python -m scripts.make_plans --look     prints how each plan would differ, and writes nothing
    python -m scripts.make_plans            writes them
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from difflib import unified_diff
from math import isclose
from pathlib import Path

from megatron_lynx.config import Job, load_job
from megatron_lynx.launch_arguments import job_of, read_launch
from megatron_lynx.plan import Plan, load_plan
from megatron_lynx.plan.plan import Predicted, Stage
from megatron_lynx.plan.plan_file import dump_plan
from megatron_lynx.planner import make_plan
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.whole_file import write_whole

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
LAUNCHES = ("gpt_13b", "llama3_8b", "gpt_175b", "llama3_70b")
"""Launches in scripts/launches/. The one for CPUs is planned from what its machine measures."""

MEMORY_GIB: Mapping[str, float | None] = {"h100-80g": None, "a100-80g": 64.6, "h800-80g": 64.6}
"""The budget of ready launches by cluster; none: all that the card has. 64.6 of 80 GB gives recomputation something to do."""


def jobs() -> Iterator[tuple[Path, Job, str]]:
    """Jobs to be planned, where their plans are kept, and the command that plans them."""
    for path in sorted((CONFIGS / "jobs").glob("*.yaml")):
        job = load_job(path)
        if job.policy == "planned" and job.cluster.matmul is not None:
            yield CONFIGS / "plans" / path.name, job, f"megatron-lynx plan jobs/{path.stem} -o configs/plans/{path.name}"
    for name in LAUNCHES:
        for cluster, memory_gib in MEMORY_GIB.items():
            path, budget = plan_path(name, cluster), "" if memory_gib is None else f" --memory-gib {memory_gib}"
            command = f"megatron-lynx plan --cluster {cluster}{budget} -o {path.relative_to(ROOT)}"
            launch = f"CLUSTER={cluster} SETTING=none scripts/launches/{name}.sh --print"
            yield path, launch_job(name, cluster), f"{command} -- $({launch})"


def plan_path(name: str, cluster: str) -> Path:
    """Where the plan of a ready launch is kept."""
    return CONFIGS / "plans/launches" / f"{name.replace('_', '-')}-{cluster}.yaml"


def launch_job(name: str, cluster: str) -> Job:
    """What a ready launch trains, where layers may still be moved."""
    memory_gib = MEMORY_GIB[cluster]
    changes = {} if memory_gib is None else {"budget.memory_gib": memory_gib}
    return job_of(read_launch(launch_words(name, cluster, "none")), cluster, changes)


def launch_words(name: str, cluster: str, setting: str) -> list[str]:
    """The command that a launch of scripts/launches/ would run, as it is where nothing is set but this."""
    command = ["bash", str(ROOT / "scripts/launches" / f"{name}.sh"), "--print"]
    environment = {"PATH": os.environ["PATH"], "CLUSTER": cluster, "SETTING": setting}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()


def plan_of(job: Job, note: str) -> Plan:
    """The plan, whose provenance is the command that makes the same one."""
    plan = make_plan(job, analytic_profile(job))
    return Plan.model_validate(plan.model_copy(update={"provenance": plan.provenance.model_copy(update={"note": note})}))


SAME = 1e-6
"""Figures that differ by a smaller part are equal: machines round differently."""


def differences(stored: Plan, made: Plan) -> list[str]:
    """How a plan differs from the stored one: seconds and bytes, stage by stage, then a diff of all else that its file says. The
    profile's digest is left out: it changes whenever a figure does."""
    found = []
    for old, new in zip(stored.stages, made.stages, strict=False):
        figures = _figures(old)
        for name, value in _figures(new).items():
            was = figures.pop(name, 0)
            if not isclose(value, was, rel_tol=SAME):
                found.append(f"stage {new.stage}: {name} {was:.12g} -> {value:.12g}{_in_percent(was, value)}")
        found += [f"stage {new.stage}: {name} {was:.12g} -> 0" for name, was in figures.items() if was]
    before, now = (_without_figures(plan, stored.provenance.profile).splitlines() for plan in (stored, made))
    return [*found, *unified_diff(before, now, "stored", "made now", lineterm="", n=1)]


def _figures(stage: Stage) -> dict[str, float]:
    said = stage.predicted.model_dump()
    memory = {f"{kind} ({moment})": size for moment, kinds in said.pop("memory").items() for kind, size in kinds.items()}
    return {name: value for name, value in {**said, **memory}.items() if value is not None}


def _in_percent(before: float, value: float) -> str:
    return f" ({100 * (value / before - 1):+.3g} %)" if before else ""


def _without_figures(plan: Plan, profile: str | None) -> str:
    stages = tuple(stage.model_copy(update={"predicted": Predicted()}) for stage in plan.stages)
    provenance = plan.provenance.model_copy(update={"profile": profile})
    return dump_plan(plan.model_copy(update={"stages": stages, "provenance": provenance}))


def main(look: bool) -> None:
    for path, job, note in jobs():
        made = plan_of(job, note)
        found = differences(load_plan(path), made) if path.exists() else ["new"]
        print("\n  ".join([f"{path.relative_to(ROOT)}: {'differs' if found else 'as stored'}", *found]))
        if not look:
            path.parent.mkdir(exist_ok=True)
            write_whole(path, dump_plan(made))


if __name__ == "__main__":
    main(look="--look" in sys.argv[1:])
