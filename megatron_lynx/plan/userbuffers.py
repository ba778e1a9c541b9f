"""Checks of plans for launches with userbuffers (--tp-comm-overlap), under which linears communicate inside their GEMMs.

    linear_qkv, linear_fc1       gather their input piece by piece during the GEMM   recomputing would communicate out of turn
    linear_proj, linear_fc2      scatter their output piece by piece; always kept
    weight gradients             communicate during their GEMM, or read a gathered   computed as in stock
                                 input from a buffer
    norms, activation, rotary,   own no userbuffer                                   recomputed, on demand or during messages
    core attention, residuals                                                        between stages, or offloaded
    checkpoints                  recomputed where backward enters their half         as in stock's full recomputation

One buffer serves all layers and all micro-batches, so a linear that runs out of turn would overwrite the input of another. A
checkpoint runs between two linears, which leave nothing in a buffer. With the exchange inside a GEMM there is no
tensor-parallel window, and no gather to share.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.anatomy import HALVES
from megatron_lynx.anatomy.address import BACKWARD_PHASES, ON_DEMAND, RECV_BACKWARD
from megatron_lynx.plan.contents import PlanContents
from megatron_lynx.plan.rule import Rule

WITHOUT = "with parallel.userbuffers (--tp-comm-overlap)"


def misplaced(plan: PlanContents) -> Iterator[str]:
    """Facts of the launch that userbuffers need."""
    layout = plan.parallel
    if not layout.userbuffers:
        return
    if not layout.sequence_parallel:
        yield "parallel.userbuffers needs parallel.sequence_parallel: true, found false, as Megatron refuses it"
    if plan.model.implementation != "transformer_engine":
        found = f"found {plan.model.implementation}: Megatron's own layers have no userbuffers"
        yield f"parallel.userbuffers needs model.implementation transformer_engine, {found}"


def problems(plan: PlanContents, rule: Rule) -> Iterator[str]:
    """Requests of a rule that do not go with userbuffers, with what to do."""
    if not plan.parallel.userbuffers:
        return
    if rule.ahead:
        yield f"{rule.ahead_said}, but {WITHOUT} reductions lie inside GEMMs, and no dispatch was tried beside them: leave it out"
    for linear in rule.weight_gradients:
        yield f"weight_gradients.{linear} is deferred, but {WITHOUT} it needs a buffer that others fill: leave it out"
    for half in HALVES:
        gathered = rule.filling(half).gathered
        if gathered in rule.replay:
            yield f"{gathered} is replayed, but {WITHOUT} it owns a userbuffer, which a replay would fill again: keep it"
        for key, at in (("windows", _windows(rule)[half]), ("gather", _gathers(rule)[half])):
            for name in dict.fromkeys(at):
                if name not in (ON_DEMAND, RECV_BACKWARD):
                    todo = f"plan it {ON_DEMAND}, or in {RECV_BACKWARD}"
                    yield f"{key}.{half} is {name}, but {WITHOUT} no tensor-parallel collective is waited for: {todo}"


def _windows(rule: Rule) -> dict[str, list[str]]:
    """Every window in which a half is recomputed."""
    return {
        half: [stretch.window for phase in BACKWARD_PHASES for stretch in rule.windows.stretches(half, phase)] for half in HALVES
    }


def _gathers(rule: Rule) -> dict[str, list[str]]:
    """Every window after which a half's input is gathered."""
    return {half: [name for phase in BACKWARD_PHASES if (name := rule.gather.of(half, phase))] for half in HALVES}
