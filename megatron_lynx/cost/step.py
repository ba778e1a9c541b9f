"""Seconds of one optimizer step under the job's policy and offload ratio, in closed form.

m x slowest stage   +   one micro-batch on all other stages / v chunks   +   messages, of which chunks hide all but the first
+   exposed host copies   +   gradients, optimizer, parameters

A pass takes at least its host time. Without flushes: m x slowest stage, copies and the update.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megatron_lynx.anatomy import Section
from megatron_lynx.config.job import Job, Policy
from megatron_lynx.cost.host import issued
from megatron_lynx.cost.recompute import recomputed_items
from megatron_lynx.cost.stage import (
    HalfSeconds,
    chunks_in_flight,
    half_seconds,
    of_every_stage,
    stage_of_layers,
    step_s,
)
from megatron_lynx.cost.stage_memory import chunk_bytes, offloads
from megatron_lynx.cost.update import update_s
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.timeline import Passes
from megatron_lynx.units import format_seconds


@dataclass(frozen=True)
class StepSeconds:
    pipeline_s: float
    bubble_s: float
    messages_s: float
    copies_s: float
    update_s: float

    @property
    def total_s(self) -> float:
        return self.pipeline_s + self.bubble_s + self.messages_s + self.copies_s + self.update_s


def step_seconds(job: Job, profile: Profile, offload_ratio: float = 0.0) -> StepSeconds:
    """Return the parts of a job's step; `job.policy` is not `planned`."""
    shape, pipeline = LayerShape.of(job), job.parallel.pipeline
    halves = _recomputing(job.policy, profile, job.model.every_section)
    stages = of_every_stage(job, lambda stage: issued(stage_of_layers(job, profile, stage, halves), job, profile, stage))
    slowest = max(stage.both_s for stage in stages)
    other_stages_s = sum(stage.both_s for stage in stages) - slowest
    message_s = profile.link_s("p2p", shape.input_bytes) if pipeline > 1 else 0.0
    flushes = job.schedule == "flush"
    return StepSeconds(
        pipeline_s=job.microbatches * slowest,
        bubble_s=other_stages_s / job.chunks if flushes else 0.0,
        messages_s=_messages_s(job, stages, message_s) if flushes else 0.0,
        copies_s=_copies_s(job, stages, offload_ratio, message_s),
        update_s=update_s(job, profile),
    )


def _messages_s(job: Job, stages: Sequence[Passes], message_s: float) -> float:
    if job.chunks > 1:
        return 2 * waited_messages(job) * message_s
    return step_s(stages, job.microbatches, message_s) - step_s(stages, job.microbatches, 0.0)


def waited_messages(job: Job) -> int:
    """Return the minimum number of consecutive messages that a step waits for in forward direction; the same again in
    backward. They are the first micro-batch's, which passes each stage once per chunk."""
    pipeline, chunks = job.parallel.pipeline, job.chunks
    if chunks > 1 and not job.overlap.messages:
        return job.microbatches * chunks + pipeline - 1
    return pipeline * chunks - 1 if job.microbatch_group == pipeline else pipeline - 1


def recomputing_stage_s(job: Job, profile: Profile, stage: int) -> Passes:
    """Return one micro-batch on a stage with the policy's recomputation; whole layers repeat their collectives."""
    return stage_of_layers(job, profile, stage, _recomputing(job.policy, profile, job.model.every_section))


def _recomputing(policy: Policy, profile: Profile, sections: Iterable[Section]) -> dict[Section, HalfSeconds]:
    """Sections of some layers only (experts) are recomputed whole or not at all."""
    halves = {section: half_seconds(profile, section) for section in sections}
    if policy == "full":
        return {section: half.recomputed_whole for section, half in halves.items()}
    recomputed = recomputed_items(policy)
    for section, half in halves.items():
        items = () if section.in_some_layers else recomputed
        priced = profile.of(section).items
        halves[section] = replace(half, again_s=sum(priced[item].forward_s for item in items if item in priced))
    return halves


def _copies_s(job: Job, stages: Sequence[Passes], ratio: float, message_s: float) -> float:
    pcie = job.cluster.pcie
    if pcie is None or ratio == 0:
        return 0.0
    exposed = [0.0]
    for number in range(job.parallel.pipeline):
        if offloads(job, number):
            copy_s = pcie.shared_s(ratio * chunk_bytes(job, number))
            exposed.append(exposed_copies_s(job, stages[number], number, copy_s, message_s))
    return max(exposed)


def exposed_copies_s(job: Job, stage: Passes, number: int, copy_s: float, message_s: float) -> float:
    """Return exposed copy seconds per step. `copy_s`: copying one chunk of stage `number` for one micro-batch, one way. Copies
    out overlap a forward during warm-up, copies back a backward during cool-down, both overlap a pair in steady state. Copies and
    messages alternate on a shared link (Yuan et al. serialise them), so a pass loses one message's time; without chunks a plan
    keeps them apart, and copies overlap only the pair's backward."""
    shared_s = message_s if meet_messages(job) else 0.0
    forward_s, backward_s = (seconds / job.chunks - shared_s for seconds in (stage.forward_s, stage.backward_s))
    ends = chunks_in_flight(job, number) - 1 if job.schedule == "flush" else 0
    pairs = job.microbatches * job.chunks - ends
    exposed_s = max(0.0, copy_s - forward_s) + max(0.0, copy_s - backward_s)
    behind_pair_s = backward_s if avoid_messages(job) else forward_s + backward_s
    return ends * exposed_s + pairs * max(0.0, copy_s - behind_pair_s)


def meet_messages(job: Job) -> bool:
    """Whether copies and pipeline messages share a link: a NIC below the device's PCIe switch, or PCIe within a node."""
    cluster = job.cluster
    if cluster.pcie is None or job.parallel.pipeline == 1:
        return False
    if cluster.node is not None and job.gpus > cluster.node.gpus:
        return cluster.pcie.shared_with_nic
    return cluster.nvlink is None


def avoid_messages(job: Job) -> bool:
    """Whether a plan alternates copies and messages: with one chunk Megatron synchronises after each exchange
    (`batch_p2p_sync`), so that a copy issued before it would be waited for, on any link."""
    return job.chunks == 1 and job.schedule == "flush" and job.parallel.pipeline > 1


@dataclass(frozen=True)
class StepRange:
    least_s: float
    most_s: float

    @classmethod
    def known(cls, seconds: float) -> StepRange:
        return cls(seconds, seconds)

    @property
    def expected_s(self) -> float:
        return (self.least_s + self.most_s) / 2

    @property
    def is_known(self) -> bool:
        return self.least_s == self.most_s

    @property
    def in_words(self) -> str:
        (least, unit), most_text = format_seconds(self.least_s).split(), format_seconds(self.most_s)
        if f"{least} {unit}" == most_text:
            return most_text
        return (
            f"{least.removesuffix('.0')} to {most_text}" if most_text.endswith(f" {unit}") else f"{least} {unit} to {most_text}"
        )

    @property
    def as_json(self) -> dict[str, float]:
        """`step_s` is the longest, as in every command; `step_at_best_s` the shortest, if it differs."""
        return {"step_s": self.most_s, **({} if self.is_known else {"step_at_best_s": self.least_s})}

    def plus(self, seconds: float) -> StepRange:
        return StepRange(self.least_s + seconds, self.most_s + seconds)


def hiding_all(profile: Profile) -> Profile:
    """Return the profile as if userbuffers hid every exchange as far as its GEMM lasts."""
    return profile.model_copy(update={"hiding": "userbuffers"})
