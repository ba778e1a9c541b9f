"""Refuses a plan for another model or layout, listing every difference.

    facts of a launch (arguments)   <── before a model is built    ──┐
                                                                     ├── compared with the plan's
    facts of a run (live model)     <── before the first step      ──┘

`refusals` checks whether a run can have any plan at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

from megatron_lynx.apply.kinds import layers_by_kind
from megatron_lynx.apply.live_run import LiveRun, captured_modules, layers_in, overlapped, recipe_of
from megatron_lynx.errors import Problem
from megatron_lynx.plan.facts import IN_BF16
from megatron_lynx.plan.plan import Plan


def mismatches(plan: Plan, run: LiveRun, overlapping: bool = False) -> list[Problem]:
    """Every difference between the plan and the run. `overlapping`: the run has no flushes."""
    problems = [*_facts(plan, run)]
    needed = "double_buffered" if overlapping else "flush"
    if plan.schedule != needed:
        run_schedule = f"{needed}, as this run has it"
        problems.insert(0, Problem("plan: schedule", plan.schedule, run_schedule, "make a plan for this schedule"))
    if not plan.chunks_of(run.stage):
        problems.append(Problem("plan: stages", f"no stage {run.stage}", f"one for each of {run.pipeline} pipeline ranks"))
    elif plan.parallel.chunks == len(run.chunks):
        problems += _layers(plan, run)
        problems += (problem for face, layers in layers_by_kind(run) for problem in face.mismatches(plan, run, layers))
    return problems


FLAGS = {
    "parallel.tensor": "--tensor-model-parallel-size",
    "parallel.context": "--context-parallel-size",
    "parallel.pipeline": "--pipeline-model-parallel-size",
    "parallel.chunks": "--num-virtual-stages-per-pipeline-rank",
    "parallel.sequence_parallel": "--sequence-parallel",
    "parallel.userbuffers": "--tp-comm-overlap",
    "model.layers": "--num-layers",
    "model.hidden": "--hidden-size",
    "model.ffn": "--ffn-hidden-size",
    "model.heads": "--num-attention-heads",
    "model.seq": "--seq-length",
    "model.implementation": "--transformer-impl",
    "model.mtp": "--mtp-num-layers",
    "model.moe_overlapped": "--overlap-moe-expert-parallel-comm",
    "model.fp8": "--fp8-recipe",
    "model.fp8_parameters": "--fp8-param-gather",
    f"model.{IN_BF16[0]}": "--num-layers-at-start-in-bf16",
    f"model.{IN_BF16[1]}": "--num-layers-at-end-in-bf16",
    "batch.micro": "--micro-batch-size",
}
"""Facts that a launch states before a model is built: keys of a plan, and their flags."""
WHY = {
    "parallel.userbuffers": "with userbuffers linears have no windows",
    "model.implementation": "windows and bytes differ",
    "model.fp8": "bytes differ",
    "model.fp8_parameters": "bytes differ",
}


def facts_of_launch(args: Any) -> dict[str, Any]:
    tensor = getattr(args, "tensor_model_parallel_size", None)
    facts = {
        "parallel.tensor": tensor,
        "parallel.context": getattr(args, "context_parallel_size", None),
        "parallel.pipeline": getattr(args, "pipeline_model_parallel_size", None),
        "parallel.chunks": getattr(args, "virtual_pipeline_model_parallel_size", None) or 1,
        "parallel.sequence_parallel": bool(getattr(args, "sequence_parallel", False)) and tensor != 1,
        "parallel.userbuffers": bool(getattr(args, "tp_comm_overlap", False)) and tensor != 1,
        "model.seq": getattr(args, "seq_length", None),
        "batch.micro": getattr(args, "micro_batch_size", None),
        **_of_model(args),
    }
    if not getattr(args, "hybrid_layer_pattern", None):  # two of its layers may be one of a plan's (`live_run`)
        facts["model.layers"] = getattr(args, "num_layers", None)
    implementation = getattr(args, "transformer_impl", None)
    if implementation is not None and getattr(args, "spec", None) is None:
        facts["model.implementation"] = implementation
    return facts


def facts_of_run(run: LiveRun) -> dict[str, Any]:
    config = run.config
    latent = getattr(config, "multi_latent_attention", False)  # which has keys for every head
    facts = {
        "parallel.tensor": run.tensor,
        "parallel.context": run.context,
        "parallel.pipeline": run.pipeline,
        "parallel.chunks": len(run.chunks),
        "parallel.sequence_parallel": bool(config.sequence_parallel and run.tensor > 1),
        "parallel.userbuffers": run.userbuffers,
        "model.layers": run.all_layers,
        **_of_model(config),
        "model.kv_groups": config.num_attention_heads if latent else config.num_query_groups,
        "model.captured": captured_modules(config),
    }
    if run.layers:
        facts["model.implementation"] = "transformer_engine" if run.uses_te else "local"
    return facts


def _of_model(settings: Any) -> dict[str, Any]:
    """Facts that arguments and model configurations have under the same names."""
    recipe, held = recipe_of(settings), ("fp8_param_gather", "fp8_param", "fp4_param")
    return {
        "model.hidden": getattr(settings, "hidden_size", None),
        "model.ffn": getattr(settings, "ffn_hidden_size", None),
        "model.heads": getattr(settings, "num_attention_heads", None),
        "model.mtp": getattr(settings, "mtp_num_layers", None) or 0,
        "model.moe_overlapped": overlapped(settings),
        "model.fp8": recipe,
        "model.fp8_parameters": recipe is not None and any(getattr(settings, name, False) for name in held),
        **(layers_in_bf16(settings) if recipe else {}),
    }


def differing(plan: Plan, facts: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(key, planned value, found value) of every fact that differs."""
    for key, fact in facts.items():
        planned = attrgetter(key)(plan)
        if planned != fact:
            yield key, planned, fact


def launch_mismatches(plan: Plan, args: Any) -> Iterator[Problem]:
    for key, planned, fact in differing(plan, facts_of_launch(args)):
        flag = "--fp4-recipe" if "nvfp4" in (planned, fact) else FLAGS[key]
        todo = "; ".join(filter(None, ("launch with the plan's, or make a plan for this launch", WHY.get(key))))
        yield Problem(flag, _said(fact), f"{_said(planned)}, as the plan has it ({key})", todo)


def _said(value: object) -> str:
    if isinstance(value, bool):
        return "given" if value else "not given"
    return "none" if value is None else str(value)


def _facts(plan: Plan, run: LiveRun) -> Iterator[Problem]:
    differences = list(differing(plan, facts_of_run(run)))
    interleaved = plan.parallel.chunks == len(run.chunks) > 1 and plan.parallel.pipeline == run.pipeline
    if interleaved and plan.parallel.group != run.group_size:
        differences.append(("parallel.microbatch_group", plan.parallel.group, run.group_size))
    for key, planned, fact in differences:
        part = key.partition(".")[0].replace("parallel", "layout")
        yield Problem(f"plan: {key}", str(planned), f"{fact}, as this run has it", f"make a plan for this {part}")


def layers_in_bf16(config: Any) -> dict[str, int]:
    """Layers that Megatron keeps in bf16 at each end of a model in FP8 (`get_fp8_context`), by a plan's key."""
    asked = getattr(config, "first_last_layers_bf16", False)
    numbers = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    return {f"model.{key}": getattr(config, name) if asked else 0 for key, name in zip(IN_BF16, numbers, strict=True)}


def _layers(plan: Plan, run: LiveRun) -> Iterator[Problem]:
    for entry, chunk in zip(plan.chunks_of(run.stage), run.chunks, strict=True):
        live = [layer.layer_number for layer in layers_in(chunk)]
        if list(entry.layers) != live:
            span = f"{live[0]}-{live[-1]}" if live else "none"
            todo = "launch with the plan's layout, or make a plan for this one"
            yield Problem(f"plan: {plan.place_of(entry)}.layers", str(entry.layers), f"{span}, as this rank has them", todo)
