"""What a plan gains over stock's best setting on cards that may be used whole: ready launches and jobs on H100, H800 and A100.

    python -m benchmarks.gains        both tables of docs/generated/gains.md

Answered as `megatron-lynx advise` answers, in the layout of the launch or job, with the memory of the card less its reserve.
Stock's best may recompute, offload, overlap exchanges of experts or use userbuffers; the plan may send activations to the host
where that gains 2 %. Steps include the optimizer's update; a range is ranked by its middle. Simulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_lynx.advise import Answer, answered
from megatron_lynx.advise.today import asked_launch
from megatron_lynx.config.job import Budget, Job
from megatron_lynx.config.loader import job_path, load_cluster, load_job
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.units import GIB
from scripts.make_plans import LAUNCHES, launch_words

CLUSTERS = {"H100": "h100-80g", "H800": "h800-80g", "A100": "a100-80g"}
JOBS = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2-lite")
"""Jobs with experts, of which `configs/jobs` has those for H800; other cards get the same job on their own cluster."""


@dataclass(frozen=True)
class Gain:
    """One launch or job on one card."""

    name: str
    card: str
    answer: Answer

    @property
    def ratio(self) -> float | None:
        """The plan's step over that of stock's best; None where either is missing."""
        plan, stock = self.answer.plan, self.answer.stock
        return None if plan is None or stock is None else plan.expected_s / stock.row.expected_s


def gains() -> Iterator[Gain]:
    for name in LAUNCHES:
        for card, cluster in CLUSTERS.items():
            asked = asked_launch(launch_words(name, cluster, "none"), cluster)
            found = answered(
                asked.job, analytic_profile(asked.job), asked.reading, refused=asked.refused, near=False, copies=True
            )
            yield Gain(f"`{name}.sh`, {asked.job.gpus} GPUs", card, found)
    for name in JOBS:
        for card, cluster in CLUSTERS.items():
            job = job_on(name, cluster)
            found = answered(job, analytic_profile(job), None, near=False, copies=True)
            yield Gain(f"{name}, {job.gpus} GPUs", card, found)


def job_on(name: str, cluster: str) -> Job:
    """The bundled job for H800 on another cluster, without its stated budget."""
    job = load_job(job_path(f"jobs/{name}-h800-80g"))
    return job.model_copy(update={"cluster": load_cluster(cluster, "--cluster"), "budget": Budget()})


def summary(found: list[Gain]) -> Iterator[str]:
    """One row for each launch: the plan's step over stock's best on each card."""
    yield f"| plan / stock's best, simulated | {' | '.join(CLUSTERS)} |"
    yield f"|---|{'--:|' * len(CLUSTERS)}"
    for name in dict.fromkeys(each.name for each in found):
        by_card = {each.card: each for each in found if each.name == name}
        yield f"| {name} | {' | '.join(_cell(by_card[card]) for card in CLUSTERS)} |"


def details(found: list[Gain]) -> Iterator[str]:
    """One row for each launch and card, with steps and bytes."""
    yield "| launch or job | card | today: none | stock's best | | plan | plan / stock's best |"
    yield "|---|---|--:|---|--:|--:|--:|"
    for each in found:
        answer, stock = each.answer, each.answer.stock
        best = "nothing fits" if stock is None else stock.setting.name
        steps = [_figures(row) for row in (answer.launch.row, None if stock is None else stock.row, answer.plan)]
        yield f"| {each.name} | {each.card} | {steps[0]} | {best} | {steps[1]} | {steps[2]} | {_cell(each)} |"


def _figures(row: object) -> str:
    return "none" if row is None else f"{row.step.in_words}, {row.memory_bytes / GIB:.1f} GiB"  # type: ignore[attr-defined]


def _cell(gain: Gain) -> str:
    if gain.ratio is not None:
        return f"{gain.ratio:.2f}"
    return "no plan" if gain.answer.plan is None else "only the plan fits"


if __name__ == "__main__":
    every = list(gains())
    print("\n".join([*summary(every), "", *details(every)]))
