"""A ranking as a table: candidates, and below them why the others lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from megatron_lynx.search.candidate import OLD_GRADIENTS, Candidate, in_words, schedule_of
from megatron_lynx.search.losers import Lost
from megatron_lynx.search.search import Ranking
from megatron_lynx.tables import WrappedTable
from megatron_lynx.units import format_bytes, format_seconds

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
