"""What a plan gains over stock's recomputed modules where layers have experts, at the same bytes.

    python -m benchmarks.when_not_experts             docs/generated/when_not_experts.md; a test holds a row current
    python -m benchmarks.when_not_experts --json      the rows with their seconds, for programs

Nothing runs, as in `benchmarks.when_not`. Each row is given what the fullest device holds where stock recomputes the modules that
cost least: `layernorm` and `moe_act`, `shared_experts` where there are any, `mla_up_proj` with latent attention.

    stock's best    of all that releases 0.16 to 0.19 offer within these bytes: module sets, blocks of layers, offloading
    overlapped      the best of these beside overlapped exchanges, where Megatron takes them (one stage, or several chunks); both
                    slow down as it was measured elsewhere, for stock and for ours
    ours            the fastest plan within these bytes, which offloads nothing
    ours beside     the fastest plan within these bytes beside overlapped exchanges, where Megatron takes them; on one stage it
                    may offload, as stock does
    gain            of the faster of our two over the faster of stock's two
    as fast         the least bytes with which one of ours is no slower than the faster of stock's two
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.when_not import on_devices_of, recomputed_s
from megatron_lynx.config.job import Job
from megatron_lynx.config.loader import bundled_configs, cluster_data
from megatron_lynx.errors import Infeasible
from megatron_lynx.planner import Decision, decide, leanest
from megatron_lynx.planner.left_open import with_exchanges
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.stock import NONE, StockSetting, priced
from megatron_lynx.stock.rival import families, rivals
from megatron_lynx.units import GIB
from megatron_lynx.yaml_file import read_yaml

REFERENCE: dict[str, Any] = {
    "tensor": 1,
    "pipeline": 2,
    "expert": 8,
    "microbatches": 16,
    "micro": 2,
    "seq": 4096,
    "gpus": 16,
}
"""The layout that rows are variations of."""

QWEN3, MIXTRAL, DEEPSEEK, DEEPSEEK_V3 = "qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v2-lite", "deepseek-v3"
H100, H800, B200 = "h100-80g", "h800-80g", "b200-180g"
BOTH = (H100, H800)

QWEN3_235B = {"layers": 94, "hidden": 4096, "ffn": 12288, "heads": 64, "experts": {"count": 128, "per_token": 8, "ffn": 1536}}
"""Beside Qwen3 30B-A3B (2505.09388, table 2)."""
ONE_STAGE_OF_V3 = {"layers": 8, "experts": {"count": 256, "per_token": 8, "ffn": 2048, "shared_ffn": 2048}}
"""As many layers of DeepSeek-V3 as one of eight stages has."""
ONE_STAGE_OF_K2 = {
    "layers": 8,
    "heads": 64,
    "kv_groups": 64,
    "vocab": 163840,
    "experts": {"count": 384, "per_token": 8, "ffn": 2048, "shared_ffn": 2048},
}
"""The same of Kimi K2, beside DeepSeek-V3 (2507.20534, table 2)."""

OVER_NODES = {"model": QWEN3, "pipeline": 1, "expert": 16, "micro": 1}
OF_235B = {
    "model": QWEN3,
    "sizes": QWEN3_235B,
    "tensor": 2,
    "pipeline": 8,
    "expert": 32,
    "gpus": 256,
    "micro": 1,
    "microbatches": 32,
    "partition": [2, *[3] * 30, 2],
}
"""The layout of a public launch."""
LARGE = {"model": DEEPSEEK_V3, "pipeline": 1, "expert": 32, "gpus": 32, "micro": 1}
OF_V3, OF_K2 = LARGE | {"sizes": ONE_STAGE_OF_V3}, LARGE | {"sizes": ONE_STAGE_OF_K2}

CASES: tuple[tuple[str, Mapping[str, Any]], ...] = tuple(
    (f"{what}, {cluster.split('-')[0].upper()}", {**change, "cluster": cluster})
    for what, change, clusters in (
        ("Qwen3 30B-A3B, p=2, experts in a node", {"model": QWEN3}, BOTH),
        ("Qwen3 30B-A3B, p=1, experts over two nodes", OVER_NODES, BOTH),
        ("Qwen3 30B-A3B, p=1, experts over two nodes, DeepEP", OVER_NODES | {"dispatcher": "deepep"}, BOTH),
        ("Qwen3 30B-A3B, p=1, experts over two nodes, HybridEP", OVER_NODES | {"dispatcher": "hybridep"}, (H100,)),
        ("Qwen3 30B-A3B, p=1, experts in a node", {"model": QWEN3, "pipeline": 1, "gpus": 8}, (B200,)),
        ("Mixtral 8x7B, p=4, experts in a node", {"model": MIXTRAL, "pipeline": 4, "gpus": 64}, BOTH),
        ("Mixtral 8x7B, t=2, p=4, experts in a node", {"model": MIXTRAL, "tensor": 2, "pipeline": 4, "gpus": 64}, BOTH),
        ("DeepSeek-V2-Lite, p=1, experts in a node", {"model": DEEPSEEK, "pipeline": 1}, BOTH),
        ("Qwen3 235B-A22B, t=2, p=8, four chunks", OF_235B, (H100,)),
        ("DeepSeek-V3, one stage, experts over four nodes", OF_V3, (H100,)),
        ("DeepSeek-V3, one stage, experts over four nodes, DeepEP", OF_V3 | {"dispatcher": "deepep"}, (H100, B200)),
        ("Kimi K2, one stage, experts over four nodes", OF_K2, (H800,)),
        ("Kimi K2, one stage, experts over four nodes, DeepEP", OF_K2 | {"dispatcher": "deepep"}, (B200,)),
    )
    for cluster in clusters
)
"""What is changed, in words and for the job."""

STEPS, FEW_STEPS, MANY_LAYERS = 6, 2, 60
"""How often the room between the least memory and a row's budget is halved; fewer times for models of many layers."""

NO_SLOWER = 1.001
"""A plan within a thousandth of stock's step is no slower."""


@dataclass(frozen=True)
class Row:
    """Seconds of one step of each setting, and bytes of the fullest device."""

    what: str
    none_s: float
    none_bytes: int
    modules_s: float
    """Stock with the row's modules recomputed."""
    budget_bytes: int
    """What that holds."""
    best_stock_s: float
    best_stock: str
    overlapped_s: float | None
    """The best beside overlapped exchanges; None where Megatron refuses them, or nothing fits."""
    overlapped: str
    ours_s: float
    hidden: float
    """The share of recomputed seconds that windows hide, in [0, 1]; 1 where nothing is recomputed."""
    beside_s: float | None
    """Our plan beside overlapped exchanges; None where Megatron refuses them, or none fits."""
    as_fast_bytes: int
    """The least that a plan holds which is no slower than the best of stock, overlapped exchanges included."""
    states_bytes: int
    """What there is of parameters, gradients and optimizer states, which no setting changes."""

    @property
    def gain(self) -> float:
        """How much faster the best of ours is than the best of stock."""
        return self.rival_s / min(each for each in (self.ours_s, self.beside_s) if each is not None) - 1

    @property
    def rival_s(self) -> float:
        """The best of stock, overlapped exchanges included."""
        return self.best_stock_s if self.overlapped_s is None else min(self.best_stock_s, self.overlapped_s)

    @property
    def less(self) -> float:
        """How much less than stock's best ours holds where it is as fast, as a share of what is no state."""
        return 1 - (self.as_fast_bytes - self.states_bytes) / (self.budget_bytes - self.states_bytes)

    @property
    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "rival_s": self.rival_s, "gain": self.gain, "less": self.less}


def job_of(change: Mapping[str, Any]) -> Job:
    """The reference layout with something changed."""
    asked = {**REFERENCE, **change}
    model, tensor = read_yaml(bundled_configs() / f"models/{asked['model']}.yaml") | asked.get("sizes", {}), asked["tensor"]
    model["experts"] = {**model["experts"], "dispatcher": asked.get("dispatcher", "alltoall")}
    replicas = asked["gpus"] // (tensor * asked["pipeline"])
    places = {"partition": asked["partition"]} if "partition" in asked else {}
    layout = places | {
        "tensor": tensor,
        "pipeline": asked["pipeline"],
        "expert": asked["expert"],
        "sequence_parallel": tensor > 1,
    }
    return Job.model_validate(
        {
            "model": model | {"seq": asked["seq"], "implementation": "transformer_engine"},
            "cluster": {**cluster_data(bundled_configs() / f"clusters/{asked['cluster']}.yaml"), "host_time": None},
            "gpus": asked["gpus"],
            "parallel": layout | {"expert_tensor": 1, "distributed_optimizer": True},
            "batch": {"micro": asked["micro"], "global": replicas * asked["micro"] * asked["microbatches"]},
        }
    )


def rows(cases: Iterable[tuple[str, Mapping[str, Any]]] = CASES) -> Iterator[Row]:
    for what, change in cases:
        yield row(what, job_of(change))


def row(what: str, job: Job) -> Row:
    profile = analytic_profile(job)
    none, modules = (priced(job, profile, setting) for setting in (NONE, cheapest(job)))
    budget_bytes = modules.most_bytes
    found = list(rivals(job, profile, budget_bytes))
    best, beside = (
        min((price for price in found if price.setting.overlap == overlap), key=lambda price: price.step_s, default=None)
        for overlap in (False, True)
    )
    assert best is not None, "the row's own modules fit"
    asked = [(job, profile), *with_overlap(job)]
    ours, *flagged = (step_within(each, of_it, budget_bytes) for each, of_it in asked)
    assert ours is not None, "a plan fits where stock's modules do"
    rival_s = best.step_s if beside is None else min(best.step_s, beside.step_s)
    hidden_s, exposed_s = (sum(seconds) for seconds in zip(*map_stages(ours), strict=True))
    states = max(modules.stages, key=lambda stage: stage.total).always
    return Row(
        what,
        none.step_s,
        none.most_bytes,
        modules.step_s,
        budget_bytes,
        best.step_s,
        best.setting.name,
        None if beside is None else beside.step_s,
        "" if beside is None else beside.setting.name,
        ours.simulation.step_s,
        hidden_s / (hidden_s + exposed_s) if hidden_s + exposed_s else 1.0,
        min((each.simulation.step_s for each in flagged if each is not None), default=None),
        as_fast_bytes(asked[::-1], rival_s, budget_bytes),
        states,
    )


def cheapest(job: Job) -> StockSetting:
    """The modules whose recomputation costs stock least."""
    latent = ("mla_up_proj",) if job.model.latent is not None else ()
    shared = ("shared_experts",) if job.model.shared_experts else ()
    return StockSetting(recompute=("layernorm", "moe_act", *shared, *latent))


Asked = tuple[Job, Profile]


def with_overlap(job: Job) -> Iterator[Asked]:
    """The same job beside overlapped exchanges, weight gradients delayed or not, with its profile, where Megatron takes them."""
    if any(family[-1].overlap for family in families(job)):
        offloading = {"offload_ratio": "auto"} if job.parallel.pipeline == 1 else {}
        for delayed in (False, True):
            flagged = with_exchanges(job, overlapped=True, delayed=delayed).model_copy(update=offloading)
            yield flagged, analytic_profile(flagged)


def step_within(job: Job, profile: Profile, budget_bytes: int) -> Decision | None:
    """The fastest plan within these bytes; None where none fits."""
    try:
        return decide(on_devices_of(job, budget_bytes / GIB), profile)
    except Infeasible:
        return None


def as_fast_bytes(asked: Sequence[Asked], step_s: float, budget_bytes: int) -> int:
    """The least that the fullest device holds under a plan, of any of these jobs, that takes no longer: found by halving; at most
    the budget."""
    job, fits, least = asked[0][0], budget_bytes, budget_bytes
    too_little = min(leanest(*each).memory_bytes for each in asked)
    for _ in range(FEW_STEPS if job.model.layers > MANY_LAYERS else STEPS):
        middle = (fits + too_little) // 2
        found = (step_within(*each, middle) for each in asked)
        fast = next((each for each in found if each is not None and each.simulation.step_s <= NO_SLOWER * step_s), None)
        if fast is not None:
            fits, least = middle, max(memory.total for memory in fast.memory)
        else:
            too_little = middle
    return least


def map_stages(decision: Decision) -> list[tuple[float, float]]:
    """Seconds of every stage's recomputations in one step: hidden, exposed."""
    return [recomputed_s(decision, stage) for stage in range(decision.job.parallel.pipeline)]


def table(rows: Iterable[Row]) -> str:
    """Markdown. Steps are ratios to stock none."""
    lines = [
        "| layout | none holds | budget | its modules | best stock: which | overlapped: which "
        "| ours | hidden | ours beside | gain | as fast | less |",
        "|---|--:|--:|--:|---|---|--:|--:|--:|--:|--:|--:|",
        *map(line, rows),
    ]
    return "\n".join(lines)


def line(row: Row) -> str:
    """One row of the table."""
    sizes = [f"{size / GIB:.1f} GiB" for size in (row.none_bytes, row.budget_bytes)]
    modules, best, ours = (f"{seconds / row.none_s:.3f}" for seconds in (row.modules_s, row.best_stock_s, row.ours_s))
    flagged = "-" if row.beside_s is None else f"{row.beside_s / row.none_s:.3f}"
    shares = [f"{round(row.gain, 3) + 0.0:.1%}", f"{row.as_fast_bytes / GIB:.1f} GiB", f"{row.less:.0%}"]
    stock = [modules, f"{best}: {row.best_stock}", beside(row)]
    return f"| {' | '.join([row.what, *sizes, *stock, ours, f'{row.hidden:.0%}', flagged, *shares])} |"


def beside(row: Row) -> str:
    """Stock with overlapped exchanges: its step; which."""
    if row.overlapped_s is None:
        return "-"
    which = ", ".join(part for part in row.overlapped.split(", ") if part != "exchanges overlapped")
    return f"{row.overlapped_s / row.none_s:.3f}{f': {which}' if which else ''}"


if __name__ == "__main__":
    found = list(rows())
    print(json.dumps([each.as_json for each in found], indent=1) if "--json" in sys.argv else table(found))
