"""What a plan says will be counted: replays per step and rank, worked out from the plan alone."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lynx.config.job import Job
from megatron_lynx.plan.order import frames_of, window_of
from megatron_lynx.plan.plan import Plan, Stage
from megatron_lynx.schedule.windows import ON_DEMAND


@dataclass
class Expected:
    replayed: int
    hidden: int
    gathered: int

    @property
    def on_demand(self) -> int:
        return self.replayed - self.hidden


def lets_go(job: Job, stage: Stage, layer: int, half: str) -> bool:
    """Whether a half has anything to replay. Some code saves nothing: bias-dropout-add without dropout, and the splitting of Q, K
    and V without rotary positions, which only makes views unless heads share keys."""
    model = job.model
    saving = {"rotary": model.position == "rope" or model.kv_groups < model.heads, "activation": True}
    saving |= dict.fromkeys(("attention_bda", "mlp_bda"), model.hidden_dropout > 0)
    replayed = stage.rule_for(layer).replays(half)  # type: ignore[arg-type]
    return any(saving.get(item, True) for item in replayed)


def expected(job: Job, plan: Plan, stage_number: int) -> Expected:
    stage = plan.stages[stage_number]
    warmup = min(job.parallel.pipeline - 1 - stage_number, job.microbatches)
    backwards = {"steady": job.microbatches - warmup, "cooldown": warmup}
    result = Expected(0, 0, 0)
    for layer, half in frames_of(stage):
        if not lets_go(job, stage, layer, half):
            continue
        result.replayed += job.microbatches
        gathers = (
            plan.parallel.sequence_parallel
            and {"attention": "linear_qkv", "mlp": "linear_fc1"}[half] in stage.rule_for(layer).replay
        )
        result.gathered += job.microbatches * gathers
        for phase, count in backwards.items():
            result.hidden += count * (window_of(stage, (layer, half), phase) != ON_DEMAND)  # type: ignore[arg-type]
    return result
