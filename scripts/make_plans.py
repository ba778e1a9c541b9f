"""Writes configs/plans/: a plan for every job of configs/jobs/ whose cluster is described, and in configs/plans/launches/ one for
every launch of scripts/launches/ on every cluster it is ready for. A test holds them current.

Run it after changing figures of models or clusters, costs, the solver, or a launch:   python -m scripts.make_plans
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from megatron_lynx.config import Job, load_job
from megatron_lynx.launch_arguments import job_of, read_launch
from megatron_lynx.plan import Plan
from megatron_lynx.plan.plan_file import dump_plan
from megatron_lynx.planner import make_plan
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.whole_file import write_whole

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
LAUNCHES = ("gpt_13b", "llama3_8b", "gpt_175b", "llama3_70b")
"""Launches in scripts/launches/. The one for CPUs is planned from what its machine measures."""

CLUSTERS = ("a100-80g", "h800-80g")
MEMORY_GIB = 64.6
"""Of 80 GB, for ready launches: less than a card has, so that replays have something to do. Ready jobs state the same."""


def jobs() -> Iterator[tuple[Path, Job, str]]:
    """Jobs to be planned, where their plans are kept, and the command that plans them."""
    for path in sorted((CONFIGS / "jobs").glob("*.yaml")):
        job = load_job(path)
        if job.policy == "planned" and job.cluster.matmul is not None:
            yield CONFIGS / "plans" / path.name, job, f"megatron-lynx plan jobs/{path.stem} -o configs/plans/{path.name}"
    for name in LAUNCHES:
        for cluster in CLUSTERS:
            path = plan_path(name, cluster)
            command = f"megatron-lynx plan --cluster {cluster} --memory-gib {MEMORY_GIB} -o {path.relative_to(ROOT)}"
            yield path, launch_job(name, cluster), f"{command} -- $(SETTING=none scripts/launches/{name}.sh --print)"


def plan_path(name: str, cluster: str) -> Path:
    """Where the plan of a ready launch is kept."""
    return CONFIGS / "plans/launches" / f"{name.replace('_', '-')}-{cluster}.yaml"


def launch_job(name: str, cluster: str) -> Job:
    """What a ready launch trains, where layers may still be moved."""
    return job_of(read_launch(launch_words(name, cluster, "none")), cluster, {"budget.memory_gib": MEMORY_GIB})


def launch_words(name: str, cluster: str, setting: str) -> list[str]:
    """The command that a launch of scripts/launches/ would run, as it is where nothing is set but this."""
    command = ["bash", str(ROOT / "scripts/launches" / f"{name}.sh"), "--print"]
    environment = {"PATH": os.environ["PATH"], "CLUSTER": cluster, "SETTING": setting}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()


def plan_text(job: Job, note: str) -> str:
    """The file's text. Its provenance is the command that makes the same plan."""
    plan = make_plan(job, analytic_profile(job))
    return dump_plan(
        Plan.model_validate(plan.model_copy(update={"provenance": plan.provenance.model_copy(update={"note": note})}))
    )


if __name__ == "__main__":
    for path, job, note in jobs():
        path.parent.mkdir(exist_ok=True)
        write_whole(path, plan_text(job, note))
        print(f"wrote {path}")
