"""Searches for the layouts with which a job is fastest on a number of devices.

job, gpus ──Space──> every layout ──BestFirst──> the fastest that fit, and why the others lost ──> Ranking
                                        └── none: the closest, and changes that help ──> Infeasible

The job gives its model, cluster, batch, memory budget, and `parallel.distributed_optimizer` if stated. Layout, micro-batch size,
policy and offload ratio are searched. Schedules without flushes are searched only if requested or stated by the job: they change
training.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from megatron_lynx.config.fit import needs_flushes
from megatron_lynx.config.job import Job, Policy
from megatron_lynx.cost.update import update_s
from megatron_lynx.errors import ConfigError, LynxError, Problem, suggestion
from megatron_lynx.planner import figures_of
from megatron_lynx.planner.decision import drafted
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.roofline import Roofline
from megatron_lynx.search.best_first import BestFirst, Lost, Watch, no_collections
from megatron_lynx.search.candidate import (
    EXACT_SCHEDULES,
    OLD_GRADIENTS,
    SCHEDULES,
    Candidate,
    ScheduleName,
    in_words,
    schedule_of,
)
from megatron_lynx.search.floor import STOCK
from megatron_lynx.search.nearest import Asked, nothing_fits
from megatron_lynx.search.space import Space
from megatron_lynx.stock import OF_POLICY, priced
from megatron_lynx.tables import WrappedTable
from megatron_lynx.units import format_bytes, format_seconds

POLICIES: tuple[Policy, ...] = (*STOCK, "planned")

MOST_GPUS = 2**20
MOST_SEQUENCES = 2**32
"""The largest batch. Larger numbers are typing errors and slow to factorise."""

NEIGHBOURS = 4096
"""Range in which numbers of devices that divide are searched."""


@dataclass(frozen=True)
class Ranking:
    """Result of a search.

    `candidates`: fastest first, each the best of its layout. `losers`: all others, by reason. `best_of`: the fastest of each
    requested schedule that fits, if schedules without flushes were requested.
    """

    job: Job
    gpus: int
    candidates: tuple[Candidate, ...]
    considered: int
    """Layouts times micro-batch sizes times policies."""
    losers: tuple[Lost, ...]
    seconds: float
    best_of: tuple[Candidate, ...] = ()

    @property
    def as_json(self) -> dict[str, Any]:
        return {
            "gpus": self.gpus,
            "budget_bytes": self.job.memory_budget_bytes,
            "candidates": [candidate.as_json for candidate in self.candidates],
            **({"best_of_schedules": [candidate.as_json for candidate in self.best_of]} if self.best_of else {}),
            "considered": self.considered,
            "losers": [lost.as_json for lost in self.losers],
            "seconds": self.seconds,
        }


def search(
    job: Job,
    gpus: int,
    *,
    top: int = 10,
    policies: Sequence[str] = POLICIES,
    offload: bool = True,
    across_nodes: bool = False,
    schedules: Sequence[str] | None = None,
    contexts: Sequence[int] | None = None,
    watch: Watch | None = None,
) -> Ranking:
    """Return the `top` fastest layouts of a job on `gpus` devices, each with its best micro-batch size, policy and offload ratio.

    Args:
        across_nodes: whether tensor-parallel groups may span nodes.
        schedules: some of `SCHEDULES`; by default those with flushes, and the job's.
        contexts: context-parallel sizes, each also with plans; by default all, but plans only for the job's and for 1.

    Raises `ConfigError` if the request is invalid or nothing divides, and `Infeasible` (the binding limit and stage, and changes
    that help) if nothing fits.
    """
    began_s = time.perf_counter()
    known, strange = _known_schedules(job, schedules)
    space = Space(job, gpus, across_nodes, known, None if contexts is None else tuple(sorted(set(contexts))))
    asked = Asked(space, _checked(space, top, policies, strange), offload)
    running = BestFirst(space, asked.policies, top, offload, watch)
    with no_collections():
        candidates = _finalists(running.run())
        if not candidates:
            raise nothing_fits(asked, running.excesses, POLICIES)
        best_of = tuple(_best_of_each(asked, candidates)) if "double-buffered" in known and len(known) > 1 else ()
    seconds = time.perf_counter() - began_s
    return Ranking(job, gpus, candidates, running.considered, running.losers.families(), seconds, best_of)


def _finalists(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Return candidates with the figures of `plan` and `estimate`, fastest first, without those that cannot be planned after all.

    A search ranks plans without weight gradients in waits. A stock policy without copies is priced as in all commands.
    """
    priced = map(_priced, candidates)
    return tuple(sorted((candidate for candidate in priced if candidate is not None), key=lambda candidate: candidate.step_s))


def _priced(candidate: Candidate) -> Candidate | None:
    job = candidate.job
    if job.policy == "planned":
        return _planned(candidate)
    if job.policy not in OF_POLICY or job.schedule != "flush" or candidate.offload_ratio:
        return candidate
    profile = analytic_profile(job)
    price = priced(job, profile, OF_POLICY[job.policy])
    return replace(candidate, step_s=price.step_s + update_s(job, profile), memory_bytes=price.most_bytes)


def _planned(candidate: Candidate) -> Candidate | None:
    profile = analytic_profile(candidate.job)
    try:
        decision = drafted(candidate.job, profile)
    except LynxError:
        return None
    figures = figures_of(decision.job, profile, decision.simulation)
    ratio = max(answer.offload_ratio for answer in decision.stages)
    return replace(candidate, step_s=figures.step_s, memory_bytes=figures.memory_bytes, offload_ratio=ratio)


def _best_of_each(asked: Asked, candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yield the fastest of each schedule that fits, even if it is not among the candidates."""
    for name in asked.space.schedules:
        schedule_candidates = [candidate for candidate in candidates if schedule_of(candidate.job) == name]
        alone = replace(asked.space, schedules=(name,))
        yield from schedule_candidates[:1] or _finalists(BestFirst(alone, asked.policies, 1, asked.offload).run())


def _known_schedules(job: Job, schedules: Sequence[str] | None) -> tuple[tuple[ScheduleName, ...], list[Problem]]:
    """Known schedules without duplicates, and problems of unknown names."""
    if schedules is None:
        return (SCHEDULES if job.schedule == "double_buffered" else EXACT_SCHEDULES), []
    asked = [name.replace("_", "-") for name in schedules]
    return tuple(name for name in SCHEDULES if name in asked), list(_of_names("--schedules", asked, SCHEDULES))


def _checked(space: Space, top: int, policies: Sequence[str], strange: Sequence[Problem]) -> tuple[Policy, ...]:
    """Policies without duplicates. Raises `ConfigError` with all problems of the request."""
    problems = [*_of_numbers(space, top), *_of_names("--policies", policies, POLICIES), *strange]
    activation_mib = space.job.budget.activation_mib
    if activation_mib is not None:
        needed = "none: a search goes by budget.memory_gib"
        problems.append(Problem("job: budget.activation_mib", f"{activation_mib:g}", needed))
    if space.job.optimizer.offload == "auto":
        todo = "state a share: the best one depends on the plan of each layout, and megatron-lynx plan finds it"
        problems.append(Problem("job: optimizer.offload", "auto", "a share in [0, 1]", todo))
    if problems:
        raise ConfigError("this search makes no sense", problems)
    Roofline.of(space.job)
    if next(space.layouts(), None) is None:
        if (short := next(space.short_of_microbatches(), None)) is not None or "flush" not in space.schedules:
            raise ConfigError("nothing can run under the schedules that are asked for", [_what_is_short(space, short)])
        raise ConfigError(f"nothing divides {space.gpus} devices", [_what_divides(space)])
    return tuple(policy for policy in POLICIES if policy in policies)


def _of_numbers(space: Space, top: int) -> Iterator[Problem]:
    if not 1 <= space.gpus <= MOST_GPUS:
        yield Problem("--gpus", str(space.gpus), f"1 to {MOST_GPUS}")
    if top < 1:
        yield Problem("--top", str(top), "at least 1")
    if space.contexts is not None and (not space.contexts or space.contexts[0] < 1):
        yield Problem("--context", ", ".join(map(str, space.contexts)) or "nothing", "sizes of at least 1")
    if space.job.batch.global_ > MOST_SEQUENCES:
        yield Problem("job: batch.global", str(space.job.batch.global_), f"at most {MOST_SEQUENCES}")


def _of_names(option: str, names: Sequence[str], known: Sequence[str]) -> Iterator[Problem]:
    if not names:
        yield Problem(option, "none", f"some of {', '.join(known)}")
    for name in names:
        if name not in known:
            yield Problem(option, repr(name), f"one of {', '.join(known)}", suggestion(name, known))


def _what_is_short(space: Space, first: Job | None) -> Problem:
    """Problem if no layout can run under the schedules; without flushes, of the layout that lacks the fewest micro-batches."""
    names = ", ".join(space.schedules)
    if "double-buffered" in space.schedules and (reasons := needs_flushes(space.job.model)):
        return Problem("--schedules", names, "flush or interleaved", "; ".join(reasons))
    if first is None:
        return Problem("--schedules", names, "layouts of several stages, or of several chunks", "add flush, or change --gpus")
    closest = max(space.short_of_microbatches(), key=lambda job: job.microbatches / job.parallel.pipeline)
    shortage = f"{closest.microbatches} micro-batches with {closest.parallel.pipeline} stages ({in_words(closest)})"
    return Problem("--schedules double-buffered", shortage, "at least as many micro-batches as stages", "enlarge batch.global")


def _what_divides(space: Space) -> Problem:
    """tensor x context x pipeline x data must be the number of devices; each factor divides something of the job."""
    model, batch = space.job.model, space.job.batch.global_
    near = sorted(range(max(1, space.gpus - NEIGHBOURS), space.gpus + NEIGHBOURS + 1), key=lambda gpus: abs(gpus - space.gpus))
    some = (gpus for gpus in near if next(Space(space.job, gpus, space.across_nodes).layouts(), None) is not None)
    nearest_gpus = sorted(gpus for gpus, _ in zip(some, range(4), strict=False))
    needed = f"tensor x context x pipeline x data, where data divides the batch ({batch}), pipeline the layers ({model.layers})"
    todo = f"the nearest that do: {', '.join(map(str, nearest_gpus))}" if nearest_gpus else ""
    return Problem("--gpus", str(space.gpus), f"{needed}, tensor the heads ({model.heads}) and context the sequence", todo)


SIZES = ("t", "c", "p", "d")
COLUMNS = (*SIZES, "layers per chunk", "schedule", "SP", "micro", "policy", "offload")
EXPERTS = ("e",)

FIGURES = ("step", "tokens/s", "MFU", "bubble", "memory", "budget")


def table(ranking: Ranking) -> Group:
    """Return a row for each candidate, fastest first, then one for each reason of losing."""
    title = f"{ranking.job.model.layers} layers on {ranking.gpus} devices"
    experts = EXPERTS if ranking.job.model.experts is not None else ()
    columns = (*experts, *COLUMNS, *FIGURES)
    best = WrappedTable(columns, words=("policy", "schedule"), keys=len(experts) + len(SIZES), title=title)
    for candidate in ranking.candidates:
        best.add(*_layout(candidate), *_figures(candidate))
    parts: list[RenderableType] = [best]
    if ranking.best_of:
        parts += [Text(line) for line in _schedules(ranking.best_of)]
    return Group(*parts, Text(""), _losers_table(ranking.losers)) if ranking.losers else Group(*parts)


def _schedules(best_of: Sequence[Candidate]) -> Iterator[str]:
    """Yield the fastest of each schedule, and a warning about old gradients."""
    least_s = min(candidate.step_s for candidate in best_of)
    for candidate in best_of:
        slower = f", {candidate.step_s / least_s:.2f} times the fastest" if candidate.step_s > least_s else ""
        what = f"{schedule_of(candidate.job)}: {in_words(candidate.job)}"
        yield f"the best {what}: {format_seconds(candidate.step_s)}{slower}"
    yield OLD_GRADIENTS


def _layout(candidate: Candidate) -> tuple[str, ...]:
    job, parallel = candidate.job, candidate.job.parallel
    sizes = (parallel.tensor, parallel.context, parallel.pipeline, job.replicas)
    slices = "yes" if parallel.sequence_parallel else "no"
    layers = "-" if job.chunks == 1 else str(parallel.layers_per_chunk)
    micro, ratio = str(job.batch.micro), f"{candidate.offload_ratio:g}"
    experts = (str(parallel.expert),) if job.model.experts is not None else ()
    return (*experts, *map(str, sizes), layers, schedule_of(job), slices, micro, job.policy, ratio)


def _figures(candidate: Candidate) -> tuple[str, ...]:
    return (
        format_seconds(candidate.step_s),
        f"{candidate.tokens_per_s:.0f}",
        f"{candidate.mfu:.1%}",
        f"{candidate.bubble_share:.1%}",
        format_bytes(candidate.memory_bytes),
        format_bytes(candidate.job.memory_budget_bytes),
    )


def _losers_table(losers: tuple[Lost, ...]) -> WrappedTable:
    words = ("lost by", "best of them", "its figure and the limit")
    columns = ("lost by", "how many", "best of them", "its figure and the limit")
    losers_table = WrappedTable(columns, words=words, title="Why the others lost, and the best of each kind")
    for lost in losers:
        losers_table.add(lost.reason, str(lost.count), lost.example, lost.numbers)
    return losers_table
