"""Seconds of one optimizer step of a whole job, as its policy and offload ratio are stated.

m x slowest stage   +   one micro-batch on all other stages / v chunks   +   messages down and up
+   copies to and from the host that nothing hides   +   gradients, optimizer, parameters

stage 0   F F F B F B F B B B | reduce-scatter of gradients, Adam on the own share, all-gather of parameters
stage 1     F B F B F B F B   |
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from megatron_lynx.config.job import Job
from megatron_lynx.cost.communication import window_lengths_s
from megatron_lynx.cost.in_flight import chunks_in_flight
from megatron_lynx.cost.layer import replayed_items
from megatron_lynx.cost.parameters import GRADIENT_BYTES, OPTIMIZER_BYTES, stage_parameters
from megatron_lynx.cost.stage import StageSeconds, stage_seconds
from megatron_lynx.cost.stage_memory import chunk_bytes, offloads
from megatron_lynx.items import HALVES
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.profiler.shape import LayerShape


@dataclass(frozen=True)
class StepSeconds:
    """The parts of a step, one after the other."""

    pipeline_s: float
    """Forwards and backwards of the slowest stage, replays and exposed collectives included."""
    bubble_s: float
    messages_s: float
    copies_s: float
    """Host copies that outlast what they run behind."""
    update_s: float
    """Gradients reduced, optimizer, parameters gathered."""

    @property
    def total_s(self) -> float:
        return self.pipeline_s + self.bubble_s + self.messages_s + self.copies_s + self.update_s


def step_seconds(job: Job, profile: Profile, offload_ratio: float = 0.0) -> StepSeconds:
    """`profile` of this job's layers; `job.policy` is not `planned`, of which only a plan knows."""
    shape, pipeline = LayerShape.of(job), job.parallel.pipeline
    stages = [replaying_stage_s(job, profile, stage, shape.gathered_bytes) for stage in range(pipeline)]
    slowest = max(stage.both_s for stage in stages)
    others = sum(stage.both_s for stage in stages) - slowest
    message_s = profile.link_s("p2p", shape.input_bytes) if pipeline > 1 else 0.0
    return StepSeconds(
        pipeline_s=job.microbatches * slowest,
        bubble_s=others / job.chunks,
        messages_s=2 * (pipeline - 1) * message_s,
        copies_s=max(_exposed_copies_s(job, stage, number, offload_ratio, message_s) for number, stage in enumerate(stages)),
        update_s=max(_update_s(job, stage) for stage in range(pipeline)),
    )


def replaying_stage_s(job: Job, profile: Profile, stage: int, message_bytes: int) -> StageSeconds:
    """One micro-batch on one stage, with what the policy replays on demand. Whole layers repeat their collectives."""
    stock = stage_seconds(job, profile, stage, message_bytes)
    items = replayed_items(job.policy)
    replay_s = sum(
        profile.half(half).items[item].forward_s for half in HALVES for item in items if item in profile.half(half).items
    )
    if job.policy == "full":
        replay_s += sum(sum(window_lengths_s(profile, "fwd", half, message_bytes)) for half in HALVES)
    return StageSeconds(stock.forward_s, stock.backward_s + job.layers_on(stage) * replay_s)


def _exposed_copies_s(job: Job, stage: StageSeconds, number: int, ratio: float, message_s: float) -> float:
    """Out behind a forward while warming up, back behind a backward at the end, both at once behind a pair in between.

    Copies and messages between stages take turns (Yuan et al. serialise them: copies slow messages down), so of each pass the
    time of one message is not theirs.
    """
    pcie = job.cluster.pcie
    if pcie is None or ratio == 0 or not offloads(job, number):
        return 0.0
    copy_s = pcie.latency_us * 1e-6 + ratio * chunk_bytes(job, number) * pcie.gpus_per_link / pcie.byte_per_s
    forward_s, backward_s = (seconds / job.chunks - message_s for seconds in (stage.forward_s, stage.backward_s))
    ends = chunks_in_flight(job, number) - 1
    pairs = job.microbatches * job.chunks - ends
    late = max(0.0, copy_s - forward_s) + max(0.0, copy_s - backward_s)
    return ends * late + pairs * max(0.0, copy_s - forward_s - backward_s)


def _update_s(job: Job, stage: int) -> float:
    """Gradients over the ranks that hold the same parameters; then norm, clipping and Adam on the own share; then parameters."""
    count, sharers = stage_parameters(job, stage).total, job.parallel.context * job.replicas
    owned = count / sharers if job.parallel.distributed_optimizer else count
    hbm = job.cluster.hbm
    state = 2 * OPTIMIZER_BYTES[job.model.dtype] + 2 * GRADIENT_BYTES + job.model.element_bytes
    adam_s = 0.0 if hbm is None else (owned * state + 2 * count * GRADIENT_BYTES) / hbm.byte_per_s  # gradients are cleared, too
    moved = (sharers - 1) / sharers * count
    gathered = job.model.element_bytes if job.parallel.distributed_optimizer else GRADIENT_BYTES
    return adam_s + moved * (GRADIENT_BYTES + gathered) / _replica_byte_per_s(job, sharers)


def _replica_byte_per_s(job: Job, sharers: int) -> float:
    """Rate of a ring over the ranks of one stage that hold the same parameters, for the stage that nodes cut worst.

    t = 2, 6 sharers, nodes of 8     node 0  0 2 4 6 | node 1  8 10    stage 0: 4 and 2 members
                                     node 1  12 14   | node 2  16 18 20 22    stage 1: 2 and 4
    The members in one node pool their NICs; where there are fewest, the ring is slowest.
    """
    node, nic, nvlink = job.cluster.node, job.cluster.nic, job.cluster.nvlink
    if node is None or nic is None or sharers == 1:
        return float("inf")
    inside = nvlink.byte_per_s if nvlink is not None else nic.byte_per_s
    together = min(_fewest_in_a_node(job, stage, sharers, node.gpus) for stage in range(job.parallel.pipeline))
    if together == sharers:
        return inside
    return min(inside, together * nic.per_node / node.gpus * nic.byte_per_s)


def _fewest_in_a_node(job: Job, stage: int, sharers: int, node_gpus: int) -> int:
    """Of a stage's first ring: Megatron numbers tensor ranks first, then context, data and pipeline ranks."""
    first = stage * job.parallel.tensor * sharers
    nodes = Counter((first + job.parallel.tensor * member) // node_gpus for member in range(sharers))
    return min(nodes.values())
