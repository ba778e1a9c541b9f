"""Writes configs/plans/: a plan for every job of configs/jobs/ whose cluster is described. A test holds them current.

Run it after changing figures of models or clusters, costs, or the solver:   python -m scripts.make_plans
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_lynx.config import Job, load_job
from megatron_lynx.plan import Plan
from megatron_lynx.plan.plan_file import dump_plan
from megatron_lynx.planner import make_plan
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.yaml_file import write_atomically

CONFIGS = Path(__file__).parents[1] / "configs"


def jobs() -> Iterator[tuple[Path, Job]]:
    """Jobs to be planned, and where their plans are kept."""
    for path in sorted((CONFIGS / "jobs").glob("*.yaml")):
        job = load_job(path)
        if job.policy == "planned" and job.cluster.matmul is not None:
            yield CONFIGS / "plans" / path.name, job


def plan_text(path: Path, job: Job) -> str:
    """The file's text. Its provenance is the command that makes the same plan."""
    plan = make_plan(job, analytic_profile(job))
    note = f"megatron-lynx plan jobs/{path.stem} -o configs/plans/{path.name}"
    return dump_plan(
        Plan.model_validate(plan.model_copy(update={"provenance": plan.provenance.model_copy(update={"note": note})}))
    )


if __name__ == "__main__":
    for path, job in jobs():
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, plan_text(path, job))
        print(f"wrote {path}")
