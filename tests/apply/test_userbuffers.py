"""Plans beside userbuffers (--tp-comm-overlap): what owns one runs once, everything else is planned as ever.

Transformer Engine's own Python runs its userbuffer paths; the buffers and the products that communicate are stood in for, over
gloo. Not run on a GPU: there pieces travel while pieces are multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from megatron_lynx.anatomy import COLUMN_PARALLEL, RECOMPUTABLE
from megatron_lynx.config.job import Job
from megatron_lynx.testbed.ranks import RankPool
from tests.tiny_jobs import tiny_job
from tests.uniform import uniform_plan

from ..long import long
from ..te_releases import pools_with
from ..transparency.checkpoints import checkpointed
from ..transparency.offloaded import offloading
from ..transparency.test_every_bit import checked
from . import on_ranks, te_on_ranks

pytestmark = pytest.mark.streams

LAYOUTS = {
    "TP2+SP": {"tensor": 2},
    "TP2xPP2+SP": {"tensor": 2, "pipeline": 2, "microbatches": 4},
    "TP2xPP2xVPP2+SP": {"tensor": 2, "pipeline": 2, "layers_per_chunk": 1, "microbatches": 4},
}
MAY_RUN_AGAIN = tuple(item for item in RECOMPUTABLE if item not in COLUMN_PARALLEL)
NORMS = ("input_layernorm", "pre_mlp_layernorm")


def job_with(like: str = "gpt", userbuffers: bool = True, **fields) -> Job:
    return tiny_job(like, implementation="transformer_engine", sequence_parallel=True, userbuffers=userbuffers, **fields)


@pytest.fixture(scope="module")
def pool_of() -> Iterator[Callable[[int], RankPool]]:
    yield from pools_with("2.9")


@pytest.mark.parametrize(
    ("layout", "like"),
    [
        ("TP2+SP", "gpt"),
        ("TP2xPP2xVPP2+SP", "llama"),
        *long(("TP2+SP", "llama"), ("TP2xPP2+SP", "gpt"), ("TP2xPP2+SP", "llama"), ("TP2xPP2xVPP2+SP", "gpt")),
    ],
)
def test_every_bit_is_as_in_stock_with_userbuffers(pool_of, layout, like):
    job = job_with(like, **LAYOUTS[layout])
    everything = uniform_plan(job)
    assert {item for stage in everything.stages for rule in stage.rules for item in rule.recompute} == set(MAY_RUN_AGAIN)
    candidates = [
        everything,
        uniform_plan(job, windows=False),
        uniform_plan(job, [*NORMS, "core_attention"]),
        uniform_plan(job, ["activation", "mlp_bda"]),
        offloading(uniform_plan(job, NORMS), 20_000),
    ]
    checked(pool_of, job, candidates)


def test_beside_overlapped_exchanges_of_experts(pool_of):
    """What runs again in a node of the combined schedule owns no userbuffer either."""
    experts = {"count": 4, "per_token": 2, "ffn": 32, "overlapped": True}
    layout = {"tensor": 2, "expert": 2, "expert_tensor": 1}
    job = job_with(**layout, experts=experts, bias=False, dtype="bf16")
    plan = uniform_plan(job, windows=False)
    recomputed = {item for stage in plan.stages for rule in stage.rules for item in rule.recompute}
    assert {"core_attention", "experts_fc1", "experts_activation"} <= recomputed
    assert not {"linear_qkv", "pre_mlp_layernorm"} & recomputed
    checked(pool_of, job, [plan])


def test_experts_may_be_checkpoints(pool_of):
    job = job_with(tensor=2, expert=2, expert_tensor=1, experts={"count": 4, "per_token": 2, "ffn": 32}, bias=False)
    kept = uniform_plan(job, "none")
    checked(pool_of, job, [checkpointed(kept, "mlp"), checkpointed(uniform_plan(job, NORMS[:1], windows=False), "mlp")])


@pytest.mark.parametrize("layout", ["TP2xPP2xVPP2+SP", *long("TP2+SP", "TP2xPP2+SP")])
def test_checkpoints_fill_userbuffers_again_as_stocks_do(pool_of, layout):
    """Where backward enters the half, between two linears, each of which leaves nothing in a buffer."""
    job = job_with("llama", layers=4, **LAYOUTS[layout])
    kept = uniform_plan(job, "none")
    checked(pool_of, job, [checkpointed(kept, one) for one in ("layer", "halves", "attention", "mlp", {"layers": 2})])


def test_what_owns_a_userbuffer_runs_once(pool_of):
    """Each buffer sees as many exchanges as in stock, and there are some."""
    job = job_with(tensor=2)
    for stock, planned in pool_of(2).run(te_on_ranks.exchanges_of, job, uniform_plan(job)):
        assert stock == planned
        assert {name for name, count in stock.items() if count} == {
            *("qkv_fprop", "qkv_dgrad", "qkv_wgrad", "proj_fprop", "proj_dgrad"),
            *("fc1_fprop", "fc1_dgrad", "fc1_wgrad", "fc2_fprop", "fc2_dgrad"),
        }


def test_a_checkpoint_exchanges_again_what_a_forward_does(pool_of):
    """But for the last linear, whose output nobody needs."""
    job = job_with(tensor=2)
    plan = checkpointed(uniform_plan(job, "none"), "layer")
    for stock, planned in pool_of(2).run(te_on_ranks.exchanges_of, job, plan):
        again = {name: planned[name] - count for name, count in stock.items() if planned[name] != count}
        assert again == {name: stock[name] for name in ("qkv_fprop", "proj_fprop", "fc1_fprop")}


@pytest.mark.parametrize(("live", "planned"), [(True, False), (False, True)], ids=["flag without plan", "plan without flag"])
def test_flag_and_plan_must_agree(pool_of, live, planned):
    plan = uniform_plan(job_with(tensor=2, userbuffers=planned), NORMS, windows=False)
    for refusal in pool_of(2).run(on_ranks.refused, job_with(tensor=2, userbuffers=live), plan, None):
        assert refusal.places == ["plan: parallel.userbuffers"]
        assert refusal.changed == []


def test_megatrons_own_layers_have_none(pool_of):
    job = tiny_job(tensor=2, sequence_parallel=True)
    flag = partial(on_ranks.set_config, tp_comm_overlap=True)
    for refusal in pool_of(2).run(on_ranks.refused, job, uniform_plan(job, NORMS), flag):
        assert refusal.places == ["config.tp_comm_overlap"]
