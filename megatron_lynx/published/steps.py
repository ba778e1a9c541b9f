"""Published steps and peaks of stock Megatron, which calibrated no constant. Each row of a series is a run.

    Narayanan et al. 2021, table 1    A100; 1.7B to 1T, unfused attention, full recomputation, up to 64 stages
    NVIDIA's recipes for Llama 3.1    H100; 8B, 70B and 405B in bf16 and FP8 (delayed scaling), two context ranks, 8 to 2,304
                                      GPUs; userbuffers and chunks with tensor-parallel ranks and stages
    Zero Bubble's 1F1B                A100; 8 to 32 stages, unfused attention, no recomputation. Peaks are of the fullest device,
                                      in whole GB, so 30 has an error of 1.7 %. It ran in fp16, so gradients are in fp16, too
                                      (Megatron's default, `validate_args`), with copies in fp32 only during updates

Settings were read in the code that ran: `configs/published_more.yaml` and docs/decisions/estimating.md name it.

Published steps of stock Megatron with and without overlapped exchanges of experts: Qwen3 30B-A3B on 16 H100.

The combined schedule's speed-up is bounded to 2 %: these rows calibrated one constant, the rate of an exchange during compute
(`cost.combined.MEASURED`). Steps are bounded to 10 %: the cluster's figures price the exchanges, and neither unfused permutation
nor HybridEP's exchange of counts is priced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from megatron_lynx.config import Job
from megatron_lynx.cost.stage_memory import memory_of_stages
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.published.row import Row, Step, analytic_step_s, catalogued_job, job_on, stock_step_s
from megatron_lynx.stock import NONE, StockSetting, priced
from megatron_lynx.units import GIB

ROW_PERCENT, SERIES_PERCENT, PEAK_PERCENT = 8.0, 5.0, 4.0
FP8_SERIES_PERCENT = 6.0
"""Bound on the mean of steps in FP8, set after the mean was known; it is larger than in bf16."""

ZERO_BUBBLE = "Zero Bubble, 2401.10241"
RECIPES, IN_FP8 = "NVIDIA, dgxc-benchmarking v25.02", "NVIDIA, dgxc v25.02, FP8"
DELAYED = {"recipe": "delayed"}
GB = 1e9

Run = Mapping[str, Any]


def rows(series: Mapping[str, Any]) -> Iterator[Row]:
    for run in series["narayanan2021_table1"]["rows"]:
        yield _row("Narayanan et al., 2104.04473", f"table 1: step of {run['model']}", run["step_s_d"], table_1_job(run))
    for name in ("8b", "70b", "405b"):
        recipe = series[f"dgxc_llama31_{name}_v2502"]
        config = {**series["dgxc_llama31_8b_v2502"]["config"], **recipe["config"]}
        for run in recipe["rows"]:
            what = f"Llama 3.1 {name.upper()}: step on {run['gpus']:,} GPUs"
            yield _row(RECIPES, what, run["step_s"], recipe_job(config, run))
            yield _row(IN_FP8, what, run["fp8_s"], recipe_job(config, run, fp8=DELAYED), RECIPES)
    for run in series["zero_bubble_baselines"]["rows"]:
        what = f"tables 3, 4: 1F1B step of {run['model']}, {run['microbatches']} micro-batches"
        yield _row(ZERO_BUBBLE, what, run["step_s_d"], zero_bubble_job(run))


def peaks(series: Mapping[str, Any]) -> Iterator[Row]:
    for run in series["zero_bubble_baselines"]["rows"]:
        what = f"table 4: peak memory of {run['model']}, {run['microbatches']} micro-batches"
        computed = max(memory.total for memory in memory_of_stages(zero_bubble_job(run))) / GB
        yield Row(ZERO_BUBBLE, what, run["peak_gb"], computed, "GB", bound=PEAK_PERCENT)


def means(step_rows: list[Row]) -> Iterator[Row]:
    for source in dict.fromkeys(row.source for row in step_rows):
        errors = [abs(row.error) for row in step_rows if row.source == source]
        what = f"mean error of {len(errors)} steps"
        bound = FP8_SERIES_PERCENT if source == IN_FP8 else SERIES_PERCENT
        yield Row(source, what, 0.0, sum(errors) / len(errors), "%", bound=bound, error_in="unit")


def table_1_job(run: Run) -> Job:
    """Nothing overlaps with GEMMs or passes, but models of one stage have torch's DDP, which overlaps."""
    layout = {"tensor": run["tp"], "pipeline": run["pp"], "scattered_messages": True}
    if run["vp"] > 1:
        layout["layers_per_chunk"] = run["layers"] // run["pp"] // run["vp"]
    return job_on(
        _gpt(run, vocab=51200, seq=2048),
        "a100-80g",
        gpus=run["gpus"],
        parallel=layout,
        optimizer={"gradients": "bf16"},
        overlap={"linears": False, "messages": False, "gradients": run["pp"] == 1},
        batch={"micro": run["mbs"], "global": run["gbs"]},
        policy="full",
    )


def recipe_job(config: Mapping[str, Any], run: Run, fp8: Mapping[str, Any] | None = None) -> Job:
    """`config`: shared by all runs of the recipe. `fp8`: the FP8 recipe."""
    names = ("layers", "hidden", "ffn", "heads", "kv_groups", "vocab", "seq")
    like: dict[str, Any] = {"norm": "rmsnorm", "bias": False, "implementation": "transformer_engine", "fp8": fp8}
    sliced = config["tp"] > 1
    layout = {"tensor": config["tp"], "sequence_parallel": sliced, "context": config["cp"], "pipeline": config["pp"]}
    if "vp" in config:
        layout["layers_per_chunk"] = config["layers"] // config["pp"] // config["vp"]
    overlap = {"gradients": config["overlap_grad_reduce"], "parameters": config["overlap_param_gather"], "userbuffers": sliced}
    return job_on(
        dict({name: config[name] for name in names}, **like, activation="swiglu", cross_entropy="native"),
        "h100-80g",
        gpus=run["gpus"],
        parallel={**layout, "distributed_optimizer": config["do"]},
        optimizer={"gradients": "bf16"},
        overlap=overlap,
        batch={"micro": config["mbs"], "global": run["gbs"]},
        policy="none",
    )


def zero_bubble_job(run: Run) -> Job:
    """The first and last stage have one layer less than the others. The script sets 16-bit gradients."""
    layers = (run["layers"] + 2) // run["pp"]
    return job_on(
        _gpt(run, vocab=32000, seq=1024),
        "a100-80g",
        gpus=run["gpus"],
        parallel={"pipeline": run["pp"], "partition": [layers - 1, *[layers] * (run["pp"] - 2), layers - 1]},
        optimizer={"gradients": "bf16"},
        batch={"micro": run["mbs"], "global": run["mbs"] * run["microbatches"]},
        policy="none",
    )


def _gpt(run: Run, vocab: int, seq: int) -> dict[str, Any]:
    sizes = {"layers": run["layers"], "hidden": run["hidden"], "ffn": 4 * run["hidden"], "vocab": vocab, "seq": seq}
    heads = {"heads": run["heads"], "kv_groups": run["heads"], "tied_embeddings": True}
    return dict(sizes | heads, attention="unfused", attention_dropout=0.1, hidden_dropout=0.1)


def _row(source: str, what: str, published_s: float, job: Job, publication: str = "") -> Row:
    return Row.of_step(source, what, Step(job, published_s, analytic_step_s, publication=publication), bound=ROW_PERCENT)


STEP_BOUND, FASTER_BOUND, PEAK_BOUND = 10.0, 2.0, 8.0

BRIDGE, QWEN3_ON_16 = "NVIDIA, Megatron-Bridge", "Megatron-Bridge, Qwen3 30B on 16 H100"
OVERLAPPED, OVERLAPPED_DELAYED = StockSetting(overlap=True), StockSetting(overlap=True, delayed=True)


def overlapped(series: Mapping[str, Any]) -> Iterator[Row]:
    for run in series["qwen3_30b_overlapped_exchanges"]["rows"]:
        yield from _of_run(run)


def _of_run(run: Run) -> Iterator[Row]:
    job, what = overlapped_job(run), f"Qwen3 30B-A3B, {run['dispatcher']}"
    measured = {NONE: run["step_s"], OVERLAPPED: run["overlapped_s"], OVERLAPPED_DELAYED: run.get("delayed_s")}
    steps = {
        setting: Step(
            job,
            step_s,
            partial(stock_step_s, setting=setting, graphs=run["dispatcher"] == "hybridep"),
            workload=f"{BRIDGE} {what}",
            publication=QWEN3_ON_16,
        )
        for setting, step_s in measured.items()
        if step_s is not None
    }
    rows = {setting: Row.of_step(BRIDGE, f"{what}: step, {setting.name}", step, STEP_BOUND) for setting, step in steps.items()}
    for setting, row in rows.items():
        yield row
        if setting != NONE:
            faster = measured[NONE] / measured[setting], rows[NONE].computed / row.computed
            name, chose = f"{what}: times as fast, {setting.name}", "cost.combined.MEASURED"
            yield Row(BRIDGE, name, *faster, "", bound=FASTER_BOUND, calibrates=chose)
    if "peak_gib" in run:
        held_gib = priced(job, analytic_profile(job), OVERLAPPED).most_bytes / GIB
        yield Row(BRIDGE, f"{what}: peak memory, {OVERLAPPED.name}", run["peak_gib"], held_gib, "GiB", bound=PEAK_BOUND)


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
