"""Expected step and bytes of each ready launch, under its plan and under stock: docs/generated/ready_launches.md.

    python -m benchmarks.ready_launches

Simulated, without the optimizer's update; bytes of the fullest device. Stock divides layers evenly.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.config.job import Job, Policy
from megatron_lynx.plan import load_plan
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.stock import OF_POLICY, priced
from megatron_lynx.units import GIB
from scripts.make_plans import LAUNCHES, MEMORY_GIB, launch_job, plan_path


def table() -> str:
    """Markdown."""
    head = "| `scripts/launches/` | on | stock none | stock full | plan |"
    return "\n".join([head, "|---|---|--:|--:|--:|", *_rows()])


def _rows() -> Iterator[str]:
    for name in LAUNCHES:
        for cluster in MEMORY_GIB:
            job = launch_job(name, cluster)
            stages = [stage.predicted for stage in load_plan(plan_path(name, cluster)).stages if stage.predicted is not None]
            ours = _cell(stages[0].step_s or 0.0, max(stage.memory_bytes or 0 for stage in stages))
            yield f"| `{name}.sh` | {job.gpus} GPUs, {cluster} | {_stock(job, 'none')} | {_stock(job, 'full')} | {ours} |"


def _stock(job: Job, policy: Policy) -> str:
    even = job.model_copy(update={"policy": policy, "parallel": job.parallel.model_copy(update={"partition": None})})
    price = priced(even, analytic_profile(even), OF_POLICY[policy])
    return _cell(price.step_s, price.most_bytes)


def _cell(seconds: float, size_bytes: int) -> str:
    return f"{seconds:.1f} s, {size_bytes / GIB:.0f} GiB"


if __name__ == "__main__":
    print(table())
