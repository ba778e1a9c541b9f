"""Checks of plans for launches with userbuffers (--tp-comm-overlap), under which linears exchange inside their GEMMs.

    linear_qkv, linear_fc1       gather their input piece by piece beside their GEMM      a replay would exchange out of turn
    linear_proj, linear_fc2      scatter their output so; always kept, as without
    weight gradients             exchange beside their GEMM, or read what was          computed where stock computes them
                                 gathered in a buffer
    norms, activation, rotary,   own no userbuffer                                        replayed, on demand or behind messages
    core attention, residuals                                                             between stages, or offloaded
    checkpoints                  run again where backward enters their half               as stock's full recomputation does

One buffer serves all layers and all micro-batches, so what runs out of turn would overwrite what another layer is about to read.
A checkpoint runs between two linears, each of which leaves nothing in a buffer. And where the exchange lies inside a GEMM,
nothing is waited for: there is no tensor-parallel window, and no gather to share.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.anatomy import HALVES
from megatron_lynx.anatomy.address import BACKWARD_PHASES, ON_DEMAND, RECV_BACKWARD
from megatron_lynx.plan.contents import PlanContents
from megatron_lynx.plan.rule import Rule

WITHOUT = "with parallel.userbuffers (--tp-comm-overlap)"


def misplaced(plan: PlanContents) -> Iterator[str]:
    """What a layout must have for userbuffers, and has not."""
    layout = plan.parallel
    if not layout.userbuffers:
        return
    if not layout.sequence_parallel:
        yield "parallel.userbuffers needs parallel.sequence_parallel: true, found false, as Megatron refuses it"
    if plan.model.implementation != "transformer_engine":
        found = f"found {plan.model.implementation}: Megatron's own layers have no userbuffers"
        yield f"parallel.userbuffers needs model.implementation transformer_engine, {found}"


def problems(plan: PlanContents, rule: Rule) -> Iterator[str]:
    """What a rule asks for and no launch with userbuffers can give, in words, with what to do."""
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
    """Every window in which a half is replayed."""
    return {
        half: [stretch.window for phase in BACKWARD_PHASES for stretch in rule.windows.stretches(half, phase)] for half in HALVES
    }


def _gathers(rule: Rule) -> dict[str, list[str]]:
    """Every collective behind which a half's input is gathered."""
    return {half: [name for phase in BACKWARD_PHASES if (name := rule.gather.of(half, phase))] for half in HALVES}
