"""Bytes of a job's stages under its policy; what stock does not have counts as none."""

from __future__ import annotations

from dataclasses import replace

from megatron_lynx.config.job import Job
from megatron_lynx.cost.moments import Parts, StageMemory
from megatron_lynx.cost.stage_memory import parts_beside_layers
from megatron_lynx.stock import NONE, OF_POLICY
from megatron_lynx.stock.stage import StockStage


def stage_parts(job: Job, stage: int) -> Parts:
    """With a head in pieces and overlapped exchanges, if the job has them."""
    parts = StockStage(job, OF_POLICY.get(job.policy, NONE), stage).parts
    return replace(parts, beside=parts_beside_layers(job, stage, layer_whole=True).beside)


def memory_of_stages(job: Job) -> tuple[StageMemory, ...]:
    return tuple(stage_parts(job, stage).fullest for stage in range(job.parallel.pipeline))
