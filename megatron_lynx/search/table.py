"""A ranking for people: the candidates, and beneath them why the others lost."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table

from megatron_lynx.search.candidate import Candidate
from megatron_lynx.search.losers import Lost
from megatron_lynx.search.ranking import Ranking
from megatron_lynx.units import format_bytes, format_seconds

COLUMNS = ("t", "c", "p", "d", "layers per chunk", "SP", "micro", "policy", "offload")
FIGURES = ("step", "tokens/s", "MFU", "bubble", "memory")


def table(ranking: Ranking) -> Group:
    """Candidates down, the fastest first; families of losers with their best example."""
    budget = format_bytes(ranking.job.memory_budget_bytes)
    best = Table(header_style="bold", title=f"{ranking.job.model.layers} layers on {ranking.gpus} devices, {budget} each")
    for column in (*COLUMNS, *FIGURES):
        best.add_column(column, justify="left" if column == "policy" else "right")
    for candidate in ranking.candidates:
        best.add_row(*_layout(candidate), *_figures(candidate))
    return Group(best, _others(ranking.losers)) if ranking.losers else Group(best)


def _layout(candidate: Candidate) -> tuple[str, ...]:
    job, parallel = candidate.job, candidate.job.parallel
    sizes = (parallel.tensor, parallel.context, parallel.pipeline, job.replicas)
    slices = "yes" if parallel.sequence_parallel else "no"
    layers = "-" if job.chunks == 1 else str(parallel.layers_per_chunk)
    return (*map(str, sizes), layers, slices, str(job.batch.micro), job.policy, f"{candidate.offload_ratio:g}")


def _figures(candidate: Candidate) -> tuple[str, ...]:
    return (
        format_seconds(candidate.step_s),
        f"{candidate.tokens_per_s:.0f}",
        f"{candidate.mfu:.1%}",
        f"{candidate.bubble_share:.1%}",
        format_bytes(candidate.memory_bytes),
    )


def _others(losers: tuple[Lost, ...]) -> Table:
    others = Table(header_style="bold", title="Why the others lost, and the best of each kind")
    for column in ("lost by", "how many", "best of them", "its figure and the limit"):
        others.add_column(column, justify="right" if column == "how many" else "left", overflow="fold")
    for lost in losers:
        others.add_row(lost.reason, str(lost.count), lost.example, lost.numbers)
    return others
