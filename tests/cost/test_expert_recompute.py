"""Sizes and FLOPs of recomputations inside experts: by hand for Mixtral, and against the real runtime and the real
megatron-core."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from megatron_lynx.anatomy import EXPERTS, EXPERTS_WITH_SHARED, ITEMS, Section
from megatron_lynx.config import Experts, Job
from megatron_lynx.cost.recompute import recomputation_of, recomputed_flops, sensible_choices
from megatron_lynx.kinds.experts.planning import expert_tensors
from megatron_lynx.plan.plan import Plan
from megatron_lynx.profiler.profile import SavedTensor
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.testbed.ranks import RankPool
from tests.cost.on_ranks import count
from tests.long import long
from tests.profiler.test_experts import mixtral
from tests.tiny_jobs import tiny_job
from tests.uniform import uniform_plan

LAYERS = 8
STATES_PER_HALF = 8
"""A frame remembers at most so many random states; they are no activations."""
Recomputation = tuple[str, ...]


def let_go(section: Section, tensors: Sequence[SavedTensor], recompute: Sequence[str]) -> int:
    """Bytes that recomputing these items saves."""
    return recomputation_of(section, tensors, ()).stays_bytes - recomputation_of(section, tensors, recompute).stays_bytes


def test_what_a_recomputation_lets_go_of_in_mixtral() -> None:
    """8192 rows of 4096 columns on arrival, 2 x 14336 between the GEMMs, 14336 behind the activation; 4096 own tokens."""
    shape = LayerShape.of(mixtral())
    row, own = 2 * 8192, 2 * 4096

    def saved(*recompute: str) -> int:
        return let_go(EXPERTS, expert_tensors(shape), recompute)

    norm, activation, fc1 = own * 4096 + own, row * 14336, row * 2 * 14336
    assert saved("pre_mlp_layernorm") == norm
    assert saved("experts_activation") == activation, "what comes out of the first GEMM is remembered"
    assert saved("experts_fc1") == 0, "kept code behind it reads what it makes"
    assert saved("experts_fc1", "experts_activation") == fc1 + activation
    assert saved("pre_mlp_layernorm", "experts_fc1", "experts_activation") == norm + fc1 + activation


def test_shared_experts_run_on_the_way_to_the_others() -> None:
    """A recomputation takes the half's code from its beginning, and what no kept site returns runs again."""
    job = tiny_job("llama", experts=Experts(count=8, per_token=2, ffn=96, shared_ffn=48))
    tensors = expert_tensors(LayerShape.of(job))
    assert recomputation_of(EXPERTS_WITH_SHARED, tensors, ("experts_activation",)).runs == (
        "shared_activation",
        "experts_activation",
    )
    choices = list(sensible_choices(EXPERTS_WITH_SHARED, tensors))
    assert ("shared_activation", "experts_activation") in choices
    assert not [chosen for chosen in choices if "experts_activation" in chosen and "shared_activation" not in chosen]
    assert max(choices, key=len) == ("pre_mlp_layernorm", "shared_fc1", "shared_activation", "experts_fc1", "experts_activation")


def plan_of(job: Job, section: Section, layers: Sequence[Recomputation]) -> Plan:
    """Attention halves are kept."""
    data = uniform_plan(job).model_dump(exclude={"stages"})
    attention = tuple(item for item in ITEMS if item not in section.names and not item.startswith(("linear_fc", "activation")))
    rules = [
        {
            "layers": number,
            "recompute": recompute,
            "keep": (*attention, *(item for item in section.names if item not in recompute)),
        }
        for number, recompute in enumerate(layers, start=1)
    ]
    stage = {"stage": 0, "layers": f"1-{len(layers)}", "ahead_depth": 0, "rules": tuple(rules)}
    return Plan.model_validate({**data, "stages": (stage,)})


@pytest.mark.parametrize(("like", "section", "shared_ffn"), [("llama", EXPERTS_WITH_SHARED, 48), *long(("gpt", EXPERTS, 0))])
def test_real_recomputations_inside_experts_cost_what_is_predicted(
    pool_of: Callable[[int], RankPool], like: str, section: Section, shared_ffn: int
) -> None:
    """Every set of items that is ever planned; layers of GELU and dropout, and of SwiGLU with shared experts."""
    experts = Experts(count=4, per_token=2, ffn=48, shared_ffn=shared_ffn)
    job = tiny_job(like, microbatches=1, layers=LAYERS, seq=64, micro=1, bias=False, experts=experts)
    shape = LayerShape(job.model, job.parallel, 1)
    tensors = expert_tensors(shape)
    sets = list(sensible_choices(section, tensors))
    planned = [(sets[first:] + sets)[:LAYERS] for first in range(0, len(sets), LAYERS)]
    plans = [plan_of(job, section, layers) for layers in ([()] * LAYERS, *planned)]
    _, kept, *found = pool_of(1).run(count, job, [None, *plans])[0]  # what comes first holds what it was the first to need
    for layers, counted in zip(planned, found, strict=True):
        assert counted.flops - kept.flops == sum(
            recomputed_flops(shape, recompute, job.model.sections(1)) for recompute in layers
        )
        saved = sum(let_go(section, tensors, recompute) for recompute in layers)
        states = saved - (kept.resident_bytes - counted.resident_bytes)
        assert -shape.tokens * 8 <= states <= counted.frames * STATES_PER_HALF * counted.state_bytes
        # What is no random state is what gloo has in flight when the forward returns: a float per token, or two.
        rest = (states + counted.state_bytes // 2) % counted.state_bytes - counted.state_bytes // 2
        assert abs(rest) <= shape.tokens * 8
