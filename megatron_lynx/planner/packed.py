"""Facts about packed sequences in a plan, from which a run with other lengths can scale the predicted seconds.

passes  =  (m + (p - 1) / v) micro-batches of the slowest stage, each with the core attention of its layers
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.config.job import Job
from megatron_lynx.kinds.dense.section import CORE_ATTENTION
from megatron_lynx.plan.facts import PackedFacts
from megatron_lynx.plan.plan import Plan, Stage
from megatron_lynx.profiler.profile import Profile


def packed_facts(plan: Plan, job: Job, profile: Profile, step_s: float) -> PackedFacts | None:
    """Return the facts; None if sequences are not packed. `job`: with its layers; `step_s`: of the plan's rehearsal."""
    if not job.batch.is_packed:
        return None
    per_token = float(job.model.seq) if job.batch.lengths is None else min(job.model.seq, job.batch.lengths.squares_per_token)
    core_s = max(sum(_core_s(plan.chunks_of(stage), job, profile)) for stage in range(plan.parallel.pipeline))
    return PackedFacts(
        squares_per_token=per_token, core_share=round(min(1.0, core_s * plan.passes(job.microbatches) / step_s), 4)
    )


def _core_s(entries: tuple[Stage, ...], job: Job, profile: Profile) -> Iterator[float]:
    """Seconds of each layer's core attention in one micro-batch, including recomputation."""
    for entry in entries:
        for layer in entry.layers:
            section, rule = job.model.sections(layer)[0], entry.rule_for(layer)
            if (core := profile.of(section).items.get(CORE_ATTENTION)) is not None:
                again = CORE_ATTENTION in rule.recomputed(section)
                yield core.forward_s * (1 + again) + core.backward_s
