"""Refuses a plan that was made for another run than the live one, with every difference at once.

    live facts   <── LiveRun          plan facts   <── plan.yaml
                         └──── compared here ────┘

Plan and run may both be sound, but not fit each other. Whether the run can carry any plan at all is checked in `refusals`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_lynx.apply.graphs import captured_modules
from megatron_lynx.apply.hybrid import layers_in
from megatron_lynx.apply.live_run import LiveRun, recipe_of
from megatron_lynx.errors import Problem
from megatron_lynx.kinds.running import layers_by_kind
from megatron_lynx.plan.facts import IN_BF16
from megatron_lynx.plan.plan import Plan


def mismatches(plan: Plan, run: LiveRun, overlapping: bool = False) -> list[Problem]:
    """Every way in which the plan was made for something else. `overlapping`: the run does not flush."""
    problems = [*_schedule(plan, overlapping), *_layout(plan, run), *_model(plan, run)]
    if not plan.chunks_of(run.stage):
        problems.append(Problem("plan: stages", f"no stage {run.stage}", f"one for each of {run.pipeline} pipeline ranks"))
    elif plan.parallel.chunks == len(run.chunks):
        problems += [*_layers(plan, run), *_kinds(plan, run)]
    return problems


def _schedule(plan: Plan, overlapping: bool) -> Iterator[Problem]:
    needed = "double_buffered" if overlapping else "flush"
    if plan.schedule != needed:
        yield Problem("plan: schedule", plan.schedule, f"{needed}, as this run has it", "make a plan for this schedule")


def _layout(plan: Plan, run: LiveRun) -> Iterator[Problem]:
    live: dict[str, int]
    found, live = plan.parallel, {"tensor": run.tensor, "context": run.context, "pipeline": run.pipeline}
    live["chunks"] = len(run.chunks)
    live["sequence_parallel"] = bool(run.config.sequence_parallel and run.tensor > 1)
    live["userbuffers"] = run.userbuffers
    planned = {name: getattr(found, name) for name in live}
    if found.chunks == len(run.chunks) > 1 and found.pipeline == run.pipeline:
        planned["microbatch_group"], live["microbatch_group"] = found.group, run.group_size
    for name, needed in live.items():
        if planned[name] != needed:
            place, stated = f"plan: parallel.{name}", str(planned[name])
            yield Problem(place, stated, f"{needed}, as this run has it", "make a plan for this layout")


def _model(plan: Plan, run: LiveRun) -> Iterator[Problem]:
    config = run.config
    latent = getattr(config, "multi_latent_attention", False)  # which has keys for every head
    live = {
        "layers": run.all_layers,
        "hidden": config.hidden_size,
        "ffn": config.ffn_hidden_size,
        "heads": config.num_attention_heads,
        "kv_groups": config.num_attention_heads if latent else config.num_query_groups,
        **({"implementation": "transformer_engine" if run.uses_te else "local"} if run.layers else {}),
        "mtp": getattr(config, "mtp_num_layers", None) or 0,
        "moe_overlapped": run.combined,
        "captured": captured_modules(config),
        "fp8": (recipe := recipe_of(config)),
        "fp8_parameters": bool(recipe and (getattr(config, "fp8_param", False) or getattr(config, "fp4_param", False))),
        **(layers_in_bf16(config) if recipe else {}),
    }
    for name, needed in live.items():
        if getattr(plan.model, name) != needed:
            found = getattr(plan.model, name)
            yield Problem(f"plan: model.{name}", str(found), f"{needed}, as this run has it", "make a plan for this model")


def layers_in_bf16(config: Any) -> dict[str, int]:
    """How many layers Megatron leaves in bf16 at each end of a model in FP8 (`get_fp8_context`), by a plan's key."""
    asked = getattr(config, "first_last_layers_bf16", False)
    numbers = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    return {key: getattr(config, name) if asked else 0 for key, name in zip(IN_BF16, numbers, strict=True)}


def _kinds(plan: Plan, run: LiveRun) -> Iterator[Problem]:
    for face, layers in layers_by_kind(run):
        yield from face.mismatches(plan, run, layers)


def _layers(plan: Plan, run: LiveRun) -> Iterator[Problem]:
    for entry, chunk in zip(plan.chunks_of(run.stage), run.chunks, strict=True):
        live = [layer.layer_number for layer in layers_in(chunk)]
        if list(entry.layers) != live:
            span = f"{live[0]}-{live[-1]}" if live else "none"
            todo = "launch with the plan's layout, or make a plan for this one"
            yield Problem(f"plan: {plan.place_of(entry)}.layers", str(entry.layers), f"{span}, as this rank has them", todo)
