"""Layouts one step away from a launch's, each with stock's best setting and a plan.

    one of:   tensor x 2 or / 2     context     pipeline     chunks     ranks that share experts
    with:     the micro-batch as it is, half, twice, four times as large
    the same GPUs and batch; without layouts that Megatron or the model does not allow

The search visits them best first, by a lower bound of their step. The fastest are planned as `plan` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from pydantic import ValidationError

from megatron_lynx.advise.today import Row, Stock, as_stock, row_of, stocks_best
from megatron_lynx.config.job import Job
from megatron_lynx.config.parallel import Parallel
from megatron_lynx.plan.plan import Plan
from megatron_lynx.planner import Decision, uniform_plan
from megatron_lynx.planner.variants import fastest_variant, fastest_with_copies
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.search.best_first import BestFirst
from megatron_lynx.search.space import Space

MOST = 2
STEPS = (2.0, 0.5)
MICRO_STEPS = (1.0, 2.0, 0.5, 4.0)


@dataclass(frozen=True)
class Neighbour:
    job: Job
    stock: Stock | None
    planned: Decision | None

    @property
    def rows(self) -> tuple[Row, ...]:
        plans = () if self.planned is None else (row_of(self.planned),)
        return plans if self.stock is None else (*plans, self.stock.row)

    @property
    def fastest(self) -> Row:
        return min(self.rows, key=lambda row: row.expected_s)

    def places(self, *, stock: bool) -> Plan:
        """A plan that places the layers: evenly for stock, which is priced so."""
        return uniform_plan(as_stock(self.job)) if stock or self.planned is None else self.planned.draft


@dataclass(frozen=True)
class Near(Space):
    def layouts(self) -> Iterator[list[Job]]:
        by_layout: dict[Parallel, list[Job]] = {}
        for parallel in _layouts(self.job):
            for step in MICRO_STEPS:
                micro = self.job.batch.micro * step
                near_job = None if micro != int(micro) else _valid(self.job, parallel, int(micro))
                if near_job is not None and (near_job.parallel, near_job.batch) != (self.job.parallel, self.job.batch):
                    by_layout.setdefault(near_job.parallel, []).append(near_job)
        return iter(by_layout.values())

    def takes_plans(self, layout: Any) -> bool:
        return True


def nearest(job: Job) -> list[Job]:
    """Return the job in the few layouts with the shortest steps, before weight gradients are placed. `job`: with the policy
    `planned`, on a described cluster."""
    running = BestFirst(Near(job, job.gpus), ("planned",), offload=job.offload_ratio != 0)
    return [candidate.job for candidate in islice(running.run(), MOST)]


def may_offload(job: Job) -> bool:
    return job.offload_ratio == 0 and job.cluster.pcie is not None


def neighbour(asked_job: Job, near_job: Job, release: str | None, *, copies: bool) -> Neighbour:
    """Answer one of the nearest jobs. Copies to the host, which take long to plan, are tried only if stock's best is faster, or
    no plan fits without."""
    job = near_job.model_copy(update={"policy": "planned", "offload_ratio": asked_job.offload_ratio, "budget": asked_job.budget})
    costs = analytic_profile(job)
    stock = stocks_best(job, costs, release)
    rival_s = None if stock is None else stock.row.expected_s
    planned = fastest_variant(job, costs, release, rival_s)
    if copies and may_offload(job) and (planned is None or (rival_s is not None and rival_s < planned.step.expected_s)):
        planned = fastest_with_copies(job, costs, release, planned, rival_s) or planned
    return Neighbour(job, stock, planned)


def _layouts(job: Job) -> Iterator[dict[str, Any]]:
    layout = job.parallel.model_dump(by_alias=True)
    yield layout
    for step in STEPS:
        for name in ("tensor", "context", "expert"):
            if (size := layout[name] * step) == int(size) and not (name == "expert" and job.model.experts is None):
                yield layout | {name: int(size)} | ({"sequence_parallel": True} if name == "tensor" and layout[name] == 1 else {})
        if (pipeline := layout["pipeline"] * step) == int(pipeline):
            yield from _placed(job, layout, int(pipeline), job.chunks)
            if job.chunks > 1:
                yield from _placed(job, layout, int(pipeline), 1)
        if (chunks := job.chunks * step) == int(chunks):
            yield from _placed(job, layout, job.parallel.pipeline, int(chunks))


def _placed(job: Job, layout: dict[str, Any], pipeline: int, chunks: int) -> Iterator[dict[str, Any]]:
    layers, virtual = job.model.layers, pipeline * chunks
    placed = layout | {"pipeline": pipeline, "layers_per_chunk": None, "partition": None, "microbatch_group": None}
    if virtual == 1 or (chunks > 1 and pipeline == 1):
        if chunks == 1:
            yield placed
        return
    if chunks == 1:
        yield placed | {"partition": "auto"}
    elif layers % virtual == 0:
        yield placed | {"layers_per_chunk": layers // virtual}
    elif (layers + 2) % virtual == 0:
        chunk_layers = (layers + 2) // virtual
        yield placed | {"partition": [chunk_layers - 1, *[chunk_layers] * (virtual - 2), chunk_layers - 1]}


def _valid(job: Job, parallel: dict[str, Any], micro: int) -> Job | None:
    """Return the job in another layout, with policy `none` as a search needs it; None if it is invalid."""
    data = job.model_dump(by_alias=True)
    data |= {"parallel": parallel, "policy": "none", "batch": {"micro": micro, "global": job.batch.global_}}
    try:
        near_job = Job.model_validate(data)
    except ValidationError:
        return None
    return near_job if near_job.cluster.keeps_together(near_job.parallel.tensor, near_job.gpus) else None
