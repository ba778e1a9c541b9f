"""Problems of the solver: made up, and of catalogued models on catalogued clusters."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

from hypothesis import strategies as st

from megatron_lynx.cost.memory import HalfMemory
from megatron_lynx.cost.recompute import INSIDE
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.solver.answer import Solved
from megatron_lynx.solver.options import HalfOptions, StageProblems
from megatron_lynx.solver.problem import Choices, Option, StageProblem
from megatron_lynx.solver.programme import Programme, keep_all
from tests.config.jobs import catalogued_job

RECOMPUTABLE = ("input_layernorm", "linear_qkv", "rotary", "core_attention")
INPUT = 10
WINDOW = "bwd.mlp.0+1"

LAYOUTS = {
    "sequence parallelism": ("llama-65b", "h800-80g", {"tensor": 8, "pipeline": 8, "sequence_parallel": True}),
    "dropout, unfused": ("gpt-22b", "a100-80g", {"tensor": 8, "pipeline": 8, "sequence_parallel": True}),
    "all-reduces": ("gpt-175b", "a100-80g", {"tensor": 8, "pipeline": 16}),
    "long windows": ("gpt-22b", "a100-80g-pcie", {"tensor": 8, "pipeline": 8}),
    "no tensor parallelism": ("gpt-1.3b", "a100-80g", {"tensor": 1, "pipeline": 8}),
    "Transformer Engine": ("llama-65b", "h800-80g", {"tensor": 8, "pipeline": 8, "sequence_parallel": True}),
}


def solve(problem: StageProblem) -> Solved:
    return Programme()(problem)


def least_memory(problem: StageProblem) -> Solved:
    return Programme().least(problem)


def option(count: int, saved: int, regenerated: int, recompute_s: float, window_s: float) -> Option:
    """A choice that recomputes the first `count` items."""
    seated = count and window_s
    return Option(
        recompute=RECOMPUTABLE[:count],
        memory=HalfMemory(INPUT + saved, regenerated, INPUT, (regenerated * bool(seated), 0, 0, 0)),
        window=WINDOW if seated else None,
        gather=None,
        recompute_s=recompute_s,
        exposed_s=max(0.0, recompute_s - window_s),
        spared_s=0.0,
        flops=count,
    )


def options(parts: list[tuple[int, float]], window_s: float) -> Choices:
    """Items of (bytes, seconds): option k recomputes the first k of them and keeps the rest, on demand or in a window."""
    total = sum(size for size, _ in parts)
    offered = []
    for count in range(len(parts) + 1):
        regenerated = sum(size for size, _ in parts[:count])
        recompute_s = sum(seconds for _, seconds in parts[:count])
        windows_s = (0.0, window_s) if count and window_s else (0.0,)
        offered += [option(count, total - regenerated, regenerated, recompute_s, seconds) for seconds in windows_s]
    return Choices(offered)


windows_s = st.sampled_from([0.0, 0.5, 1.0, 2.0, 20.0])


def parts(most: int) -> st.SearchStrategy[list[tuple[int, float]]]:
    return st.lists(st.tuples(st.integers(1, 100), st.sampled_from([0.25, 0.5, 1.0, 3.0])), min_size=1, max_size=most)


@st.composite
def problems(draw, max_layers=4, window_s=windows_s, most_parts=3):
    attention, mlp = draw(parts(most_parts)), draw(parts(most_parts))
    layers = draw(st.integers(1, max_layers))
    halves = options(attention, draw(window_s)), options(mlp, draw(window_s))
    return StageProblem(
        0,
        alike(layers, *halves, options(mlp, 0.0)),
        in_flight=draw(st.sampled_from([1, 2, 3, 2.5])),
        loss_bytes=draw(st.sampled_from([0, 0, 30, 300])),
    )


def alike(layers: int, attention: Choices, mlp: Choices, last_mlp: Choices) -> tuple[Choices, ...]:
    """Halves of a stage whose layers differ in the last MLP half only."""
    return (attention, mlp) * (layers - 1) + (attention, last_mlp)


def with_layers(problem: StageProblem, layers: int) -> StageProblem:
    """A stage with another number of the same layers."""
    halves = problem.halves[:2] * (layers - 1) + problem.halves[-2:]
    return replace(problem, halves=halves, inside=problem.inside[:2] * layers)


def budgets(problem: StageProblem, steps: int = 3) -> list[StageProblem]:
    """From what is needed at least to what keeping everything takes."""
    least, most = least_memory(problem).peak_bytes, keep_all(problem).peak_bytes
    return [replace(problem, budget_bytes=least + (most - least) * step // steps) for step in range(steps + 1)]


def every_answer(problem: StageProblem) -> list[Solved]:
    """Each half on its own."""
    every = product(*problem.halves[:2] * (problem.layers - 1), *problem.halves[-2:])
    return [Solved(halves, problem.in_flight, loss_bytes=problem.loss_bytes) for halves in every]


@cache
def catalogued(name: str) -> StageProblems:
    """All stages of a job of 256 devices."""
    model, cluster, layout = LAYOUTS[name]
    batch = 16 * 256 // (layout["tensor"] * layout["pipeline"])
    job = catalogued_job(model, cluster, parallel=layout, policy="planned", batch=batch)
    if name == "Transformer Engine":
        job = job.model_copy(update={"model": job.model.model_copy(update={"implementation": "transformer_engine"})})
    return StageProblems(job, HalfOptions(job, analytic_profile(job)))


@st.composite
def catalogued_problems(draw, layers=24):
    """A stage with some of its job's memory."""
    stages = catalogued(draw(st.sampled_from(sorted(LAYOUTS))))
    problem = with_layers(stages.of(draw(st.integers(0, stages.job.parallel.pipeline - 1))), layers)
    least, most = least_memory(replace(problem, inside=())).peak_bytes, keep_all(problem).peak_bytes
    return replace(problem, budget_bytes=least + int(draw(st.floats(0, 1)) * (most - least)))


def grouped(answer: Solved) -> bool:
    """Whether several layers keep one input."""
    return any(half.checkpoint == INSIDE for half in answer.halves)
