"""Published steps of stock Megatron with and without overlapped exchanges of experts: Qwen3 30B-A3B on 16 H100.

The combined schedule's speed-up is bounded to 2 %: these rows calibrated one constant, the rate of an exchange during compute
(`cost.combined.MEASURED`). Steps are bounded to 10 %: the cluster's figures price the exchanges, and neither unfused permutation
nor HybridEP's exchange of counts is priced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_lynx.config import Job
from megatron_lynx.cost.update import update_s
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.published.row import Row, catalogued_job
from megatron_lynx.stock import NONE, StockSetting, priced
from megatron_lynx.units import GIB

STEP_PERCENT, FASTER_PERCENT, PEAK_PERCENT = 10.0, 2.0, 8.0

SOURCE = "NVIDIA, Megatron-Bridge"
OVERLAPPED = StockSetting(overlap=True)
DELAYED = StockSetting(overlap=True, delayed=True)

Run = Mapping[str, Any]


def rows(series: Mapping[str, Any]) -> Iterator[Row]:
    """`series`: of the file of figures, by id."""
    for run in series["qwen3_30b_overlapped_exchanges"]["rows"]:
        yield from _of_run(run)


def _of_run(run: Run) -> Iterator[Row]:
    job, what = overlapped_job(run), f"Qwen3 30B-A3B, {run['dispatcher']}"
    costs = analytic_profile(job)
    measured = {NONE: run["step_s"], OVERLAPPED: run["overlapped_s"], DELAYED: run.get("delayed_s")}
    found = {setting: priced(job, costs, setting) for setting, step_s in measured.items() if step_s is not None}
    steps = {setting: price.step.most_s + update_s(job, costs) for setting, price in found.items()}
    for setting, step_s in steps.items():
        yield Row(SOURCE, f"{what}: step, {setting.name}", measured[setting], step_s, "s", bound=STEP_PERCENT)
        if setting != NONE:
            faster = measured[NONE] / measured[setting], steps[NONE] / step_s
            name, chose = f"{what}: times as fast, {setting.name}", "cost.combined.MEASURED"
            yield Row(SOURCE, name, *faster, "", bound=FASTER_PERCENT, calibrates=chose)
    if "peak_gib" in run:
        held_gib = found[OVERLAPPED].most_bytes / GIB
        yield Row(SOURCE, f"{what}: peak memory, {OVERLAPPED.name}", run["peak_gib"], held_gib, "GiB", bound=PEAK_PERCENT)


def overlapped_job(run: Run) -> Job:
    """Two nodes, 64 micro-batches of one sequence on each GPU."""
    experts = {"count": 128, "per_token": 8, "ffn": 768, "dispatcher": run["dispatcher"]}
    return catalogued_job(
        "qwen3-30b-a3b",
        "h100-80g",
        model={"implementation": "transformer_engine", "cross_entropy": "te", "experts": experts},
        gpus=16,
        parallel={"expert": 16, "expert_tensor": 1, "distributed_optimizer": True},
        optimizer={"gradients": "bf16"},
        batch={"micro": 1, "global": 1024},
        policy="none",
    )
