"""Lower bound of a step from the seconds of one layer: the closed form of `cost.step` without host copies and host time, where
each message between stages is waited for once.

    one (tensor, context, sequence parallelism, micro-batch)  ──profile──>  LayerCost
    many (pipeline, chunks, data)                             ──floor────>  Spent      a few additions each
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_lynx.anatomy import PASSES, Section
from megatron_lynx.config.job import Job, Policy
from megatron_lynx.cost.communication import embedding_of, window_lengths_s
from megatron_lynx.cost.ends import last_end_of
from megatron_lynx.cost.stage import of_every_stage, stage_seconds
from megatron_lynx.cost.step import recomputing_stage_s, waited_messages
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.search.candidate import Spent

STOCK: tuple[Policy, ...] = ("none", "selective", "full")
"""Policies that need no plan."""


@dataclass(frozen=True)
class LayerCost:
    """Cost of a layer, the embedding and the output layer: one micro-batch, forward and backward, on one rank."""

    profile: Profile
    layer_s: float
    collectives_s: float
    """Part of the layer's seconds in which it waits for tensor-parallel ranks."""
    recompute_s: Mapping[Policy, float]
    embedding_s: float
    head_s: float
    message_s: float

    @classmethod
    def of(cls, job: Job) -> LayerCost:
        """Costs of the job's layers, independent of stages."""
        profile, shape = analytic_profile(job), LayerShape.of(job)
        device = profile.model_copy(update={"host_time": None})
        ends = embedding_of(profile, shape.gathered_bytes), last_end_of(profile, shape.gathered_bytes, job.head_pieces)
        embedding_s, head_s = (block.forward_s + block.backward_s for block in ends)
        whole = {policy: _whole_model_s(job, device, shape, policy) for policy in STOCK}
        layer_s = (whole["none"] - embedding_s - head_s) / job.model.layers
        return cls(
            profile=profile,
            layer_s=layer_s,
            collectives_s=_collectives_s(job, profile, shape.gathered_bytes),
            recompute_s={policy: (whole[policy] - whole["none"]) / job.model.layers for policy in STOCK},
            embedding_s=embedding_s,
            head_s=head_s,
            message_s=profile.link_s("p2p", shape.input_bytes),
        )

    def floor(self, job: Job) -> Spent:
        """A step under the job's policy, without copies, gradients and optimizer; a plan may hide all its recomputation."""
        pipeline, microbatches, recompute_s = job.parallel.pipeline, job.microbatches, self.recompute_s.get(job.policy, 0.0)
        layers, slowest_s, others_s = self._split(job)
        others_s += (pipeline - 1) * layers * recompute_s
        collectives_s = microbatches * layers * self.collectives_s
        flushes = job.schedule == "flush"  # without flushes later passes can hide all waits
        return Spent(
            compute_s=microbatches * slowest_s - collectives_s,
            recompute_s=microbatches * layers * recompute_s,
            communication_s=collectives_s + (2 * waited_messages(job) * self.message_s if flushes else 0.0),
            bubble_s=others_s / job.chunks if flushes else 0.0,
        )

    def slowest_s(self, job: Job) -> float:
        """Seconds of one micro-batch on the slowest stage without recomputation."""
        return self._split(job)[1]

    def _split(self, job: Job) -> tuple[int, float, float]:
        """Fewest layers on a stage; seconds of one micro-batch without recomputation on the slowest, and on all others. Unequal
        stages are priced one by one."""
        pipeline, partition = job.parallel.pipeline, job.partition
        if len(set(partition)) > 1:
            stages_s = of_every_stage(job, lambda stage: stage_seconds(job, self.profile, stage).both_s)
            slowest_s = max(stages_s)
            return min(map(job.layers_on, range(pipeline))), slowest_s, sum(stages_s) - slowest_s
        layers = job.model.layers // pipeline
        ends_s = self.embedding_s, self.head_s
        if pipeline == 1:
            return layers, layers * self.layer_s + sum(ends_s), 0.0
        return layers, layers * self.layer_s + max(ends_s), (pipeline - 1) * layers * self.layer_s + min(ends_s)


def _collectives_s(job: Job, profile: Profile, message_bytes: int) -> float:
    """Mean over layers. Layers with experts have their exchanges instead of the MLP's collectives."""
    kinds, shares = job.model.kinds_of(range(1, job.model.layers + 1)), Counter[Section]()
    for kind, layers in kinds.items():
        shares.update(dict.fromkeys(kind, layers))
    waits_s = [
        shares[section] / job.model.layers * sum(window_lengths_s(profile, passing, section, message_bytes))
        for passing in PASSES
        for section in job.model.halves.values()
    ]
    exchanged_s = 0.0 if profile.experts is None else profile.experts.communication_s
    return sum(waits_s) + len(job.model.expert_layers) / job.model.layers * exchanged_s


def _whole_model_s(job: Job, profile: Profile, shape: LayerShape, policy: Policy) -> float:
    """Seconds of one micro-batch with all layers on one stage."""
    parallel = job.parallel.model_copy(update={"pipeline": 1, "layers_per_chunk": None})
    flat = job.model_copy(update={"parallel": parallel, "policy": policy})
    return recomputing_stage_s(flat, profile, 0).both_s
