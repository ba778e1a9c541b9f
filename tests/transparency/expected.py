"""What a plan says will be counted: recomputations per step and rank, worked out from the plan alone."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan, Stage
from megatron_lynx.plan.timetables import timetable_of
from megatron_lynx.schedule.flushes import with_flushes
from megatron_lynx.schedule.schedule import Schedule


@dataclass
class Expected:
    recomputed: int
    hidden: int
    gathered: int
    nothing_behind_gather: int = 0
    """Of those on demand: halves of which a gather's own run makes all that was let go. Where it began early, nothing is left."""

    @property
    def on_demand(self) -> int:
        return self.recomputed - self.hidden


def lets_go(job: Job, stage: Stage, layer: int, half: str, apart: Collection[str] = ()) -> bool:
    """Whether a half has anything to recompute, these items apart. Some code saves nothing: bias-dropout-add without dropout, and
    the splitting of Q, K and V without rotary positions, which only makes views unless heads share keys."""
    model = job.model
    saving = {"rotary": model.position == "rope" or model.kv_groups < model.heads, "activation": True}
    saving |= dict.fromkeys(("attention_bda", "mlp_bda"), model.hidden_dropout > 0)
    recomputed = stage.rule_for(layer).recomputed_in(half)  # type: ignore[arg-type]
    return any(saving.get(item, True) for item in recomputed if item not in apart)


def schedule_of(job: Job) -> Schedule:
    layout = job.parallel.pipeline, job.microbatches
    return with_flushes(*layout, job.chunks, job.microbatch_group)


def expected(job: Job, plan: Plan, stage: int) -> Expected:
    """Backward by backward, in the order of the schedule."""
    result = Expected(0, 0, 0)
    timetable = timetable_of(plan, stage)
    for action, _ in schedule_of(job).phases(stage):
        entry = plan.chunks_of(stage)[action.chunk]
        if action.kind == "F" or (entry.whole is not None and action.micro_batch in entry.whole):
            continue
        backward = timetable.backward(action.chunk)
        for half in backward.halves:
            layer, name = half.half
            entered, demanded = backward.at("enter", half.half), backward.at("demand", half.half)
            result.recomputed += sum(task.do == "recompute" and task.half != half.half for task in entered)
            if entry.rule_for(layer).checkpoints(name):  # type: ignore[arg-type]
                in_waits = [task for wait in half.waits for task in backward.at("in", wait.window)]
                rest_in_wait = any(task.half == half.half and task.since for task in in_waits)
                result.recomputed += any(task.half == half.half for task in entered) or rest_in_wait
                result.hidden += rest_in_wait and not (job.model.hidden_dropout and layer in job.model.expert_layers)
                continue
            if not lets_go(job, entry, layer, name):
                continue
            result.recomputed += 1
            result.hidden += not demanded
            rule = entry.rule_for(layer)
            section = rule.filling(name)
            gathered = plan.parallel.sequence_parallel and section.gathered in rule.recompute
            behind = lets_go(job, entry, layer, name, (section.norm, section.gathered))
            result.nothing_behind_gather += gathered and bool(demanded) and not behind
            result.gathered += gathered
    return result
