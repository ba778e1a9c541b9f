"""How long solving takes: seconds on one core, medians, for catalogued jobs with analytic profiles.

    python -m benchmarks.solver_speed -o benchmarks/results

    demand                                                    at most
    answers for 96 layers on 16 stages                        0.05 s     options priced, every stage solved

Then the growth of each with its size. A profile is at hand when the clock starts; the process is bound to one core.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

from benchmarks import one_core
from megatron_lynx.config.job import Job
from megatron_lynx.config.loader import bundled_configs, cluster_data
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.solver.answer import Solved
from megatron_lynx.solver.options import HalfOptions, StageProblems
from megatron_lynx.solver.problem import StageProblem
from megatron_lynx.solver.programme import Programme, keep_all
from megatron_lynx.yaml_file import read_yaml

SHARES = (0.02, 0.1, 0.3, 0.6, 0.9)
"""Budgets, from the least that a stage needs (0) to what it holds if it keeps everything (1)."""


@dataclass(frozen=True)
class Row:
    """One thing that was timed."""

    what: str
    size: str
    median_s: float
    slowest_s: float
    at_most_s: float | None = None
    note: str = ""


def job_of(model: str, cluster: str, *, tensor: int, pipeline: int, layers: int | None = None, gpus: int | None = None) -> Job:
    """A catalogued model, with another number of layers if one is given; 8 micro-batches for every stage."""
    size = read_yaml(bundled_configs() / "models" / f"{model}.yaml")
    ranks = gpus or tensor * pipeline
    fields = {
        "model": size | ({"layers": layers} if layers else {}),
        "cluster": cluster_data(bundled_configs() / "clusters" / f"{cluster}.yaml"),
        "gpus": ranks,
        "parallel": {
            "tensor": tensor,
            "pipeline": pipeline,
            "sequence_parallel": cluster == "h800-80g",
            "distributed_optimizer": True,
        },
        "batch": {"micro": 1, "global": 8 * pipeline * ranks // (tensor * pipeline)},
        "policy": "planned",
    }
    return Job.model_validate(fields)


def timed(action: Callable[[], Any], rounds: int) -> list[float]:
    seconds = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began_s)
    return seconds


def with_budget(problem: StageProblem, share: float) -> StageProblem:
    least, most = Programme().least(problem).peak_bytes, keep_all(problem).peak_bytes
    return replace(problem, budget_bytes=least + int(share * (most - least)))


def solved_row(model: str, cluster: str, layers: int, stages: int, rounds: int, at_most_s: float | None = None) -> Row:
    """All stages of a job, nothing priced before. The slowest of several budgets counts."""
    job = job_of(model, cluster, tensor=8, pipeline=stages, layers=layers)
    profile = analytic_profile(job)
    medians, slowest = [], []
    for share in SHARES:
        problems = StageProblems(job, HalfOptions(job, profile))
        budgets = [with_budget(problems.of(stage), share).budget_bytes for stage in range(stages)]

        def plan(budgets: Sequence[int | None] = budgets) -> list[Solved]:
            problems = StageProblems(job, HalfOptions(job, profile))
            return [Programme()(replace(problems.of(stage), budget_bytes=size)) for stage, size in enumerate(budgets)]

        seconds = timed(plan, rounds)
        medians.append(statistics.median(seconds))
        slowest.append(max(seconds))
    return Row("solved", f"{layers} layers x {stages} stages", max(medians), max(slowest), at_most_s, f"{model}, {cluster}")


def rows(rounds: int) -> Iterator[Row]:
    """Demands first, then growth."""
    yield solved_row("gpt-175b", "h800-80g", 96, 16, rounds, 0.05)
    yield solved_row("gpt-175b", "a100-80g", 96, 16, rounds, 0.05)
    for stages in (1, 2, 4, 8, 32):
        yield solved_row("gpt-175b", "a100-80g", 96, stages, rounds)
    for layers in (16, 32, 192, 384):
        yield solved_row("gpt-175b", "a100-80g", layers, 16, rounds)


def markdown(found: Sequence[Row], machine: str) -> str:
    lines = [f"# Seconds of planning, {date.today()}", "", machine, ""]
    lines += ["| what | size | median s | slowest s | at most s | |", "|---|---|--:|--:|--:|---|"]
    for row in found:
        bound = "" if row.at_most_s is None else f"{row.at_most_s:g}"
        lines.append(f"| {row.what} | {row.size} | {row.median_s:.4f} | {row.slowest_s:.4f} | {bound} | {row.note} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    one_core.run("solver-speed", __doc__, 7, rows, _line, markdown)


def _line(row: Row) -> str:
    return f"{row.what:10} {row.size:28} {row.median_s:9.4f} s   {row.note}"


if __name__ == "__main__":
    main()
