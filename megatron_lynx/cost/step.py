"""A step's range of seconds, the messages that it waits for, and copies that no pass hides, in closed form."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lynx.config.job import Job
from megatron_lynx.cost.stage import chunks_in_flight
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.timeline import Passes
from megatron_lynx.units import format_seconds


def waited_messages(job: Job) -> int:
    """Return the minimum number of consecutive messages that a step waits for in forward direction; the same again in
    backward. They are the first micro-batch's, which passes each stage once per chunk."""
    pipeline, chunks = job.parallel.pipeline, job.chunks
    if chunks > 1 and not job.overlap.messages:
        return job.microbatches * chunks + pipeline - 1
    return pipeline * chunks - 1 if job.microbatch_group == pipeline else pipeline - 1


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
