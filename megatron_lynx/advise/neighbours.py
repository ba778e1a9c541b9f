"""Layouts one step away from a launch's, each under a plan: what the memory that is left would buy.

    one of:   tensor x 2 or / 2     context     pipeline     chunks     ranks that share experts
    with:     the micro-batch as it is, half, twice, four times as large
    as many GPUs, the same batch; what Megatron or the model does not allow is left out

The search looks at them best first, by what they take at least. The fastest are then planned as `plan` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import ValidationError

from megatron_lynx.advise.today import Row, row_of
from megatron_lynx.config.job import Job
from megatron_lynx.errors import LynxError
from megatron_lynx.plan.plan import Plan
from megatron_lynx.planner import decide
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.search.best_first import BestFirst
from megatron_lynx.search.space import Layout, Space

MOST, MOST_OF_MANY = 3, 2
"""Neighbours that are planned and shown; fewer where a pipeline has more than `MANY` virtual stages: each plan takes seconds."""

MANY = 8

STEPS = (2.0, 0.5)
MICRO_STEPS = (1.0, 2.0, 0.5, 4.0)


@dataclass(frozen=True)
class Neighbour:
    """A layout under its plan."""

    job: Job
    plan: Plan
    row: Row


@dataclass(frozen=True)
class Near(Space):
    """The layouts around `job`'s, as a search takes them. `gpus` is the job's own."""

    @cached_property
    def _jobs(self) -> Mapping[Layout, tuple[Job, ...]]:
        by_layout: dict[Layout, list[Job]] = {}
        for parallel in _layouts(self.job):
            for step in MICRO_STEPS:
                micro = self.job.batch.micro * step
                found = None if micro != int(micro) else _valid(self.job, parallel, int(micro))
                if found is not None and not _same(found, self.job):
                    by_layout.setdefault(Layout(found.parallel, found.schedule), []).append(found)
        return {layout: tuple(jobs) for layout, jobs in by_layout.items()}

    def layouts(self) -> Iterator[Layout]:
        return iter(self._jobs)

    def on(self, layout: Layout) -> Iterator[Job]:
        return iter(self._jobs[layout])

    def short_of_microbatches(self) -> Iterator[Job]:
        return iter(())

    def takes_plans(self, layout: Any) -> bool:
        return True


def neighbours(job: Job) -> list[Neighbour]:
    """The fastest few, best first; fewer where fewer fit. `job`: with the policy `planned`, on a described cluster."""
    most = MOST if job.parallel.pipeline * job.chunks <= MANY else MOST_OF_MANY
    found = BestFirst(Near(job, job.gpus), ("planned",), most, offload=job.offload_ratio != 0).run()
    planned = [_planned(job, candidate.job) for candidate in found]
    return sorted((each for each in planned if each is not None), key=lambda each: each.row.step_s)


def _planned(own: Job, found: Job) -> Neighbour | None:
    """As `plan` makes it; the search leaves weight gradients where they are."""
    job = found.model_copy(update={"policy": "planned", "offload_ratio": own.offload_ratio, "budget": own.budget})
    costs = analytic_profile(job)
    try:
        decision = decide(job, costs)
    except LynxError:
        return None
    return Neighbour(job, decision.plan, row_of(decision, costs, ""))


def _layouts(job: Job) -> Iterator[dict[str, Any]]:
    """Data of the layout itself and of those one step away."""
    own = job.parallel.model_dump(by_alias=True)
    yield own
    for step in STEPS:
        for name in ("tensor", "context", "expert"):
            if (size := own[name] * step) == int(size) and not (name == "expert" and job.model.experts is None):
                yield own | {name: int(size)} | ({"sequence_parallel": True} if name == "tensor" and own[name] == 1 else {})
        if (pipeline := own["pipeline"] * step) == int(pipeline):
            yield from _placed(job, own, int(pipeline), job.chunks)
            if job.chunks > 1:
                yield from _placed(job, own, int(pipeline), 1)
        if (chunks := job.chunks * step) == int(chunks):
            yield from _placed(job, own, job.parallel.pipeline, int(chunks))


def _placed(job: Job, own: dict[str, Any], pipeline: int, chunks: int) -> Iterator[dict[str, Any]]:
    """A layout with so many stages of so many chunks: all alike, or with the embedding and the loss counted as layers."""
    layers, virtual = job.model.layers, pipeline * chunks
    placed = own | {"pipeline": pipeline, "layers_per_chunk": None, "partition": None, "microbatch_group": None}
    if virtual == 1 or (chunks > 1 and pipeline == 1):
        if chunks == 1:
            yield placed
        return
    if chunks == 1:
        yield placed | {"partition": "auto"}
    elif layers % virtual == 0:
        yield placed | {"layers_per_chunk": layers // virtual}
    elif (layers + 2) % virtual == 0:
        each = (layers + 2) // virtual
        yield placed | {"partition": [each - 1, *[each] * (virtual - 2), each - 1]}


def _valid(job: Job, parallel: dict[str, Any], micro: int) -> Job | None:
    """The job in another layout, with policy `none` as a search wants it; None where it is no job."""
    data = job.model_dump(by_alias=True)
    data |= {"parallel": parallel, "policy": "none", "batch": {"micro": micro, "global": job.batch.global_}}
    try:
        found = Job.model_validate(data)
    except ValidationError:
        return None
    return None if _across_nodes(found) else found


def _across_nodes(job: Job) -> bool:
    """Whether tensor-parallel ranks would be on several nodes."""
    node = job.cluster.node
    return node is not None and job.gpus > node.gpus and node.gpus % job.parallel.tensor != 0


def _same(found: Job, job: Job) -> bool:
    return found.parallel == job.parallel and found.batch == job.batch
