"""Steps of stock Megatron that others measured, which chose no constant: series of rows, each one run.

    Narayanan et al. 2021, table 1    A100; 1.7B to 1T, unfused attention, whole layers replayed, up to 64 stages
    NVIDIA's recipe for Llama 3.1 8B  H100; two context ranks, 8 to 128 GPUs
    Zero Bubble's 1F1B                A100; 8 to 32 stages, unfused attention, nothing replayed

What a job says beside the figures was read in the sources: `configs/published_more.yaml` and docs/decisions.md name them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_lynx.config import Job, Model
from megatron_lynx.cost.step import step_seconds
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.published.row import Row, described_job

ROW_PERCENT, SERIES_PERCENT = 8.0, 5.0
"""Bounds on the error of one step, and on the mean of a series."""

Run = Mapping[str, Any]


def rows(figures: Mapping[str, Any]) -> Iterator[Row]:
    """All rows. `figures`: the whole file of them."""
    series = {each["id"]: each for each in figures["series"]}
    for run in series["narayanan2021_table1"]["rows"]:
        yield _row("Narayanan et al., 2104.04473", f"table 1: step of {run['model']}", run["step_s_d"], table_1_job(run))
    recipe = series["dgxc_llama31_8b_v2502"]
    for run in recipe["rows"]:
        what = f"Llama 3.1 8B: step on {run['gpus']} GPUs"
        yield _row("NVIDIA, dgxc-benchmarking v25.02", what, run["step_s"], recipe_job(recipe["config"], run))
    for run in series["zero_bubble_baselines"]["rows"]:
        what = f"tables 3, 4: 1F1B step of {run['model']}, {run['microbatches']} micro-batches"
        yield _row("Zero Bubble, 2401.10241", what, run["step_s_d"], zero_bubble_job(run))


def means(found: list[Row]) -> Iterator[Row]:
    """The mean error of each series."""
    for source in dict.fromkeys(row.source for row in found):
        errors = [abs(row.error) for row in found if row.source == source]
        what = f"mean error of {len(errors)} steps"
        yield Row(source, what, 0.0, sum(errors) / len(errors), "%", bound=SERIES_PERCENT, error_in="unit")


def table_1_job(run: Run) -> Job:
    """Nothing is reduced behind a GEMM, no message sent behind a pass; models of one stage have torch's DDP, which overlaps."""
    layout = {"tensor": run["tp"], "pipeline": run["pp"], "scattered_messages": True}
    if run["vp"] > 1:
        layout["layers_per_chunk"] = run["layers"] // run["pp"] // run["vp"]
    return described_job(
        _gpt(run, vocab=51200, seq=2048),
        "a100-80g",
        gpus=run["gpus"],
        parallel=layout,
        optimizer={"gradients": "bf16"},
        overlap={"linears": False, "messages": False, "gradients": run["pp"] == 1},
        batch={"micro": run["mbs"], "global": run["gbs"]},
        policy="full",
    )


def recipe_job(config: Mapping[str, Any], run: Run) -> Job:
    """`config`: what all its runs share."""
    names = ("layers", "hidden", "ffn", "heads", "kv_groups", "vocab", "seq")
    sizes = {name: config[name] for name in names}
    return described_job(
        Model(
            **sizes, activation="swiglu", norm="rmsnorm", bias=False, implementation="transformer_engine", cross_entropy="native"
        ),
        "h100-80g",
        gpus=run["gpus"],
        parallel={"context": config["cp"], "distributed_optimizer": config["do"]},
        optimizer={"gradients": "bf16"},
        overlap={"gradients": config["overlap_grad_reduce"], "parameters": config["overlap_param_gather"]},
        batch={"micro": config["mbs"], "global": run["gbs"]},
        policy="none",
    )


def zero_bubble_job(run: Run) -> Job:
    """The stages at the ends have one layer less than the others. Its script asks for 16-bit gradients."""
    each = (run["layers"] + 2) // run["pp"]
    return described_job(
        _gpt(run, vocab=32000, seq=1024),
        "a100-80g",
        gpus=run["gpus"],
        parallel={"pipeline": run["pp"], "partition": [each - 1, *[each] * (run["pp"] - 2), each - 1]},
        optimizer={"gradients": "bf16"},
        batch={"micro": run["mbs"], "global": run["mbs"] * run["microbatches"]},
        policy="none",
    )


def _gpt(run: Run, vocab: int, seq: int) -> Model:
    return Model(
        layers=run["layers"],
        hidden=run["hidden"],
        ffn=4 * run["hidden"],
        heads=run["heads"],
        kv_groups=run["heads"],
        vocab=vocab,
        seq=seq,
        attention="unfused",
        attention_dropout=0.1,
        hidden_dropout=0.1,
        tied_embeddings=True,
    )


def _row(source: str, what: str, published_s: float, job: Job) -> Row:
    computed_s = step_seconds(job, analytic_profile(job)).total_s
    return Row(source, what, published_s, computed_s, "s", bound=ROW_PERCENT)
