"""Korthikanti et al. (2205.05198): memory of parameters and activations, seconds of a layer and of a step, utilisation.

Like their figures, these rows count weight matrices at 18 bytes (bf16, fp32 gradient, fp32 copy and two moments, no distributed
optimizer) and activations, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from megatron_lynx.anatomy import ATTENTION
from megatron_lynx.config import Job
from megatron_lynx.cost.communication import embedding_of, head_of
from megatron_lynx.cost.parameters import gradient_bytes, mfu, optimizer_bytes, parameter_bytes, stage_parameters
from megatron_lynx.plan.plan import Stage, Whole
from megatron_lynx.planner.uniform import uniform_plan
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.published.row import Row, Step, catalogued_job, stock_step_s
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.stock import NONE, OF_POLICY, SELECTIVE, priced
from megatron_lynx.stock.price import memory_of_stages
from megatron_lynx.stock.stage import StockStage
from megatron_lynx.units import GIB

SOURCE = "Korthikanti et al., 2205.05198"

TECHNIQUES = {
    "none": ("none", False),
    "seq": ("none", True),
    "sel": ("selective", False),
    "seqsel": ("selective", True),
    "full": ("full", False),
}

EXPERIMENTS = {
    "baseline_no_recompute": "none",
    "sequence_parallelism": "seq",
    "full_recompute": "full",
    "selective": "sel",
    "selective_plus_sp": "seqsel",
}

CALIBRATING = ("baseline_no_recompute", "sequence_parallelism")
"""Runs of table 4 whose forwards calibrated `matmul.efficiency` of the A100, and their backwards `matmul.beside_collective`."""


def rows(figures: Mapping[str, Any]) -> Iterator[Row]:
    configs = {config["model"]: config for config in figures["configs"]}
    for published in figures["figure1_memory_gib_per_gpu"]:
        yield from _memory(configs[published["model"]], published)
    for published in figures["figure7_pct_of_tp_baseline"]:
        yield from _shares(configs[published["model"]], published)
    for published in figures["table4_layer_times_ms_22B"]:
        yield from _layer_seconds(configs["22B"], published)
    for published in figures["table5"]:
        yield from _steps(configs[published["model"]], published)
    for published in figures["appendix_c_mfu_with_whole_microbatches"]:
        yield _gained_by_whole(configs[published["model"]], published)


def job_of(config: Mapping[str, Any], technique: str) -> Job:
    """Megatron of 2022: messages are scattered over tensor ranks (since January 2021) and not overlapped (until May 2023)."""
    policy, sequence_parallel = TECHNIQUES[technique]
    layout: dict[str, Any] = {"tensor": config["t"], "pipeline": config["p"], "sequence_parallel": sequence_parallel}
    layout["scattered_messages"] = not sequence_parallel
    if config["interleave_m"] > 1:
        layout["layers_per_chunk"] = config["layers"] // (config["p"] * config["interleave_m"])
    return catalogued_job(
        f"gpt-{config['model'].lower()}",
        "a100-80g",
        gpus=config["gpus"],
        parallel=layout,
        overlap={"messages": False},
        batch={"micro": config["micro_batch"], "global": config["global_batch"]},
        policy=policy,
    )


def _memory(config: Mapping[str, Any], published: Mapping[str, Any]) -> Iterator[Row]:
    job, name = job_of(config, "none"), config["model"]
    count = stage_parameters(job, 0).matrices
    states = parameter_bytes(job, count) + gradient_bytes(job, count) + optimizer_bytes(job, count)
    yield Row(SOURCE, f"figure 1: parameters and optimizer, {name}", published["params_opt"], states / GIB, "GiB", bound=1.0)
    for key, technique in (("act_tp_only", "none"), ("act_seqsel", "seqsel")):
        computed = _activations(config, technique) / GIB
        yield Row(SOURCE, f"figure 1: activations, {name}, {key}", published[key], computed, "GiB", bound=1.0)


def _shares(config: Mapping[str, Any], published: Mapping[str, Any]) -> Iterator[Row]:
    whole = _activations(config, "none")
    for technique in TECHNIQUES:
        computed = 100 * _activations(config, technique) / whole
        what = f"figure 7: activations of tensor parallelism alone, {config['model']}, {technique}"
        yield Row(SOURCE, what, published[technique], computed, "%", bound=1.0, error_in="unit")


def _activations(config: Mapping[str, Any], technique: str) -> int:
    job = job_of(config, technique)
    return StockStage(job, OF_POLICY[job.policy], 0).parts.activations


def _layer_seconds(config: Mapping[str, Any], published: Mapping[str, Any]) -> Iterator[Row]:
    job, experiment = job_of(config, EXPERIMENTS[published["exp"]]), published["exp"]
    profile = analytic_profile(job)
    message_bytes = LayerShape.of(job).gathered_bytes
    stage = priced(job, profile, OF_POLICY[job.policy]).microbatch_s(0)
    embedding, head = embedding_of(profile, message_bytes), head_of(profile, message_bytes)
    forward_ms = 1e3 * (stage.forward_s - embedding.forward_s - head.forward_s) / job.model.layers
    backward_ms = 1e3 * (stage.backward_s - embedding.backward_s - head.backward_s) / job.model.layers
    computed = (
        ("fwd", forward_ms, "efficiency"),
        ("bwd", backward_ms, "beside_collective"),
        ("total", forward_ms + backward_ms, ""),
    )
    for key, milliseconds, constant in computed:
        chose = f"a100-80g: matmul.{constant}" if constant and experiment in CALIBRATING else None
        what = f"table 4: a layer of 22B, {experiment}, {key}"
        yield Row(SOURCE, what, published[key], milliseconds, "ms", bound=5.0, calibrates=chose)


def _steps(config: Mapping[str, Any], published: Mapping[str, Any]) -> Iterator[Row]:
    name, peak = config["model"], 312e12 * config["gpus"]
    for key, technique in (("full_recompute_s", "full"), ("present_s", "seqsel")):
        job = job_of(config, technique)
        price_s = partial(stock_step_s, setting=OF_POLICY[job.policy])
        step = Step(job, published[key], price_s, workload=f"{SOURCE} {name}")
        yield Row.of_step(SOURCE, f"table 5: step of {name}, {key.removesuffix('_s')}", step, bound=5.0)
    tokens_per_s = config["global_batch"] * job.model.seq / published["present_s"]
    utilised = 100 * mfu(job.model, tokens_per_s, peak, "whole")
    what = f"table 5: MFU of {name}, from its seconds"
    yield Row(SOURCE, what, published["mfu"], utilised, "points", bound=0.2, error_in="unit")


def _gained_by_whole(config: Mapping[str, Any], published: Mapping[str, Any]) -> Row:
    """Gain in utilisation if each stage keeps as many of its outstanding micro-batches whole as fit in its memory."""
    job = job_of(config, "seqsel").model_copy(update={"policy": "planned"})
    profile, plan = analytic_profile(job), uniform_plan(job, (ATTENTION.core,))
    held, kept = (memory_of_stages(job, setting) for setting in (SELECTIVE, NONE))
    shares = [
        min(1.0, (job.memory_budget_bytes - some.total) / (every.total - some.total))
        for some, every in zip(held, kept, strict=True)
    ]
    whole = tuple(_with_whole(entry, config["p"] - entry.stage, shares[entry.stage]) for entry in plan.stages)
    before_s, behind_s = (rehearse(variant, profile).step_s for variant in (plan, plan.model_copy(update={"stages": whole})))
    gained = (published["mfu"] - published["gain"]) * (before_s / behind_s - 1)
    what = f"appendix C: MFU of {config['model']} gained by whole micro-batches"
    return Row(SOURCE, what, published["gain"], gained, "points", bound=1.0, error_in="unit")


def _with_whole(entry: Stage, outstanding: int, share: float) -> Stage:
    first = int(share * outstanding)
    return entry.model_copy(update={"whole": Whole(of_every=outstanding, first=first) if first else None})
