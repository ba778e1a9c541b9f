"""Deferred weight gradients beside experts, simulated: one layer by hand. Every item takes 1 s forward and 2 s backward, of which
a linear's weight gradient is one; an exchange of tokens takes 5 s, and that of their probabilities nothing.

    backward    [ residual, combine ] (bwd.0) [ fc2, activation, fc1, dispatch ] (bwd.1) (bwd.2) [ router, shared, norm ]
"""

from __future__ import annotations

import pytest

from megatron_lynx.anatomy import ATTENTION, EXPERTS_WITH_SHARED
from megatron_lynx.anatomy.address import WindowAddress
from megatron_lynx.config.parallel import Parallel
from megatron_lynx.cost.memory import HalfMemory
from megatron_lynx.cost.section import PricedSection, weight_gradient
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.profile import ExpertHalf, ItemProfile
from megatron_lynx.simulator.halves import segments
from megatron_lynx.simulator.walk import Treated
from megatron_lynx.timetable import PlannedHalf
from tests.config.jobs import catalogued_job
from tests.simulator.by_hand import passes_of_halves
from tests.simulator.test_weight_gradients import A_SECOND, PLENTY, step_of

SECTION = EXPERTS_WITH_SHARED
ITEM = {"forward_s": 1.0, "backward_s": 2.0, "saved_bytes": 0, "output_bytes": 0, "flops": 0}
GEMM = ITEM | {"dgrad_s": 1.0, "wgrad_s": 1.0}


def profile_with_experts(expert=2):
    job = catalogued_job("mixtral-8x7b", "h800-80g", gpus=8, parallel=Parallel(tensor=1, expert=expert))
    profile = analytic_profile(with_shared(job))
    items = {name: ItemProfile(**(GEMM if name in SECTION.linears else ITEM)) for name in SECTION.names}
    half = ExpertHalf(input_bytes=100, items=items, tensors=(), exchange_s=5.0 if expert > 1 else 0.0)
    attention = {name: ItemProfile(**(GEMM if name in ATTENTION.linears else ITEM)) for name in ATTENTION.names}
    own = profile.attention.model_copy(update={"items": attention})
    return profile.model_copy(update={"experts": half, "attention": own, "interference": 1.0})


def with_shared(job):
    experts = job.model.experts.model_copy(update={"shared_ffn": 32})
    return job.model_copy(update={"model": job.model.model_copy(update={"experts": experts})})


def passes_of(waits, expert=2, most_bytes=PLENTY):
    """A layer that recomputes nothing. `waits`: of the linears that defer their weight gradients."""
    halves = tuple(
        Treated(
            PlannedHalf(1, section, deferred={name: waits[name] for name in reversed(section.linears) if name in waits}),
            PricedSection(HalfMemory(resident=50, regenerated=0, tail=15)),
            deferred={name: A_SECOND for name in reversed(section.linears) if name in waits},
        )
        for section in (ATTENTION, SECTION)
    )
    return passes_of_halves(halves, profile_with_experts(expert), deferral=(0, most_bytes))


def at(passing, ordinal):
    return WindowAddress(passing, 1, "mlp", ordinal)


def test_where_each_is_left():
    stock, shared = (segments(profile_with_experts(), "bwd", SECTION, off) for off in ((), ("shared_fc1", "shared_fc2")))
    assert (stock.compute_s, stock.windows_s) == ((4.0, 8.0, 0.0, 10.0), (5.0, 0.0, 5.0))
    assert (shared.compute_s, shared.windows_s) == ((4.0, 8.0, 0.0, 8.0), (5.0, 0.0, 5.0))
    whole = [segments(profile_with_experts(expert=1), "bwd", SECTION, off) for off in ((), SECTION.linears)]
    assert [(len(each.compute_s), each.windows_s) for each in whole] == [(1, ()), (1, ())]
    assert sum(whole[0].compute_s) - sum(whole[1].compute_s) == len(SECTION.linears)


@pytest.mark.parametrize("linear", ["linear_qkv", "shared_fc1", "shared_fc2"])
def test_exchanges_hide_those_of_the_micro_batch_before(linear):
    """Of all but the last micro-batch in the next backward, or in the forward behind; then the last one's is flushed."""
    stock = step_of(passes_of({}), 3)
    for place in (*(at("bwd", ordinal) for ordinal in (0, 2)), *(at("fwd", ordinal) for ordinal in (0, 2))):
        filled = step_of(passes_of({linear: (place,)}), 3)
        assert (filled.total(0, "filled_s"), filled.total(0, "unfilled_s")) == (2.0, 1.0)
        assert filled.step_s == stock.step_s - 2
        held = filled.memory(0)
        assert held.bytes[-1] == 0
        assert min(held.bytes) >= 0


@pytest.mark.parametrize("linear", ["experts_fc1", "experts_fc2"])
def test_experts_own_run_while_their_gradients_go_back(linear):
    """In the same backward; in the exchange that has passed by then, in the next one."""
    stock = step_of(passes_of({}), 3)
    for ordinal, flushed in ((2, 0.0), (0, 1.0)):
        filled = step_of(passes_of({linear: (at("bwd", ordinal),)}), 3)
        assert (filled.total(0, "filled_s"), filled.total(0, "unfilled_s")) == (3.0 - flushed, flushed)
        assert filled.step_s == stock.step_s - 3 + flushed
        assert filled.memory(0).bytes[-1] == 0
    assert step_of(passes_of({linear: (at("bwd", 2),)}, most_bytes=1), 3).total(0, "unfilled_s") == 3.0, (
        "what does not fit runs at once"
    )


def test_what_they_take_and_hold():
    """Of shared experts as of an MLP of their width; of the others on every row that comes: input and gradient."""
    job = with_shared(catalogued_job("mixtral-8x7b", "h800-80g", gpus=8, parallel=Parallel(tensor=1, expert=8)))
    profile, tokens, model = analytic_profile(job), job.model.seq * job.batch.micro, job.model
    widths = {"shared_fc1": (model.hidden, 2 * 32), "shared_fc2": (32, model.hidden)}
    rows, ffn = model.experts.per_token, model.experts.ffn
    widths |= {"experts_fc1": (rows * model.hidden, rows * 2 * ffn), "experts_fc2": (rows * ffn, rows * model.hidden)}
    for linear, (taken, made) in widths.items():
        wgrad_s, element = profile.of(SECTION).items[linear].wgrad_s, tokens * model.element_bytes
        assert weight_gradient(profile, SECTION, linear)[:3] == (wgrad_s, element * taken, element * made), linear
