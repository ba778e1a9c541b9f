"""Checks of plans for latent attention: rules name its items, and recompute only those that may be.

up-projections       recomputed anywhere: their gathered inputs (sequence parallelism) are small, and kept
fused rotary kernel  works in place: recomputed together with the linear that made its input, or not at all
linears that gather  the residual stream, with sequence parallelism: kept. Those are Megatron's own down-projections, and
                     `linear_q_proj` if queries are not compressed
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.anatomy import HALVES
from megatron_lynx.plan.contents import PlanContents
from megatron_lynx.plan.rule import Rule


def misplaced(plan: PlanContents) -> Iterator[str]:
    """Facts of the launch that do not go with latent attention."""
    model = plan.model
    if model.latent_attention is None:
        return
    if model.kv_groups != model.heads:
        yield f"model.kv_groups is {model.kv_groups}, needed {model.heads} (heads): latent attention has keys for every head"
    if plan.parallel.userbuffers:
        yield "parallel.userbuffers is true, needed false: latent attention with --tp-comm-overlap is not planned"


def problems(plan: PlanContents, rule: Rule) -> Iterator[str]:
    """Items of an attention half that a rule names wrongly, with what to do."""
    half, section = HALVES[0], plan.model.halves[HALVES[0]]
    if rule.checkpoints(half) or rule.filling(half).opaque:  # checked by `plan.opaque`
        return
    found = rule.filling(half).names
    if found != section.names:
        needed = f"{', '.join(section.names)}, as model.latent_attention says"
        yield f"found items {', '.join(found)} of the {half} half, needed {needed}"
        return
    if torn := section.torn(rule.replay):
        linear, code = section.in_place
        why = f"the fused rotary kernel overwrites what {linear} returned, and what runs again behind it would do so twice"
        yield f"{', '.join(torn)} is kept, needed replayed, or all of {linear}, {code} and what comes behind kept: {why}"
    if plan.parallel.sequence_parallel:
        for linear in section.gathering_rows:
            if linear in rule.replay:
                yield f"{linear} is replayed, but gathers the residual stream under sequence_parallel: keep it"
    if plan.model.implementation == "transformer_engine":
        for item in section.norms_apart(rule.replay):
            inside = "Transformer Engine makes the norm inside the linear"
            yield f"{item.name} is replayed, and {item.norm_inside} with it: {inside}"
