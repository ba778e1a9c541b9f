"""Other releases of megatron-core, smoke-tested. Each comes first on the ranks' import path, and equals itself under a plan.

`make test` puts them into build/megatron-core-0.NN and sets MEGATRON_CORE_0_NN_DIR. Wheels from 0.17 on are for Python 3.12,
but what is needed of them is Python alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from megatron_lynx.anatomy.address import is_forward
from megatron_lynx.testbed.ranks import RankPool
from tests.deferring import deferring
from tests.tiny_jobs import tiny_job

from ..long import long
from ..te_releases import folder_of, python_path
from ..transparency.checkpoints import ahead, checkpointed, with_rest_in_wait
from ..transparency.plans import plan_for, recomputable
from ..transparency.trials import Trial
from . import on_ranks
from .head_on_ranks import How, compare
from .test_head_in_pieces import SMALL, in_pieces

RELEASES = ("0.17", "0.18", "0.19", "0.20")

NEW = {
    "0.17": {"fused_residual_rmsnorm": True},
    "0.18": {
        "use_transformer_engine_op_fuser": True,
        "use_grouped_gemm_for_dense_mlp": True,
        "mlp_chunks_for_training": 2,
        "moe_paged_stash": True,
    },
    "0.19": {"gtp_weight_remat_size": 2},
    "0.20": {"gtp_weight_remat_size": 2, "enable_mhc_connections": True},
}
"""What came with a release and works against a plan."""


@pytest.fixture(scope="module", params=RELEASES)
def release(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def pool_on(release) -> Iterator[Callable[[int], RankPool]]:
    path = python_path(folder_of("MEGATRON_CORE", release, "megatron/core"))
    pools: dict[int, RankPool] = {}

    def pool(ranks: int) -> RankPool:
        return pools.setdefault(ranks, RankPool(ranks, env={"PYTHONPATH": path}))

    yield pool
    for started in pools.values():
        started.close()


EXPERTS = {"count": 4, "per_token": 2, "ffn": 32, "shared_ffn": 32, "layers": ("2-4",)}
LAYOUTS = [
    *long({"tensor": 2}, {"tensor": 2, "sequence_parallel": True}, {"pipeline": 2, "microbatches": 4}),
    {"pipeline": 2, "microbatches": 4, "layers_per_chunk": 1},
    {"tensor": 2, "sequence_parallel": True, "expert": 2, "expert_tensor": 1, "experts": EXPERTS, "bias": False},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_planned_training_equals_stock_in_every_bit(pool_on, release, layout):
    job = tiny_job("gpt", **layout)
    plans = [
        plan_for(job, lambda _: recomputable(job), windows=False),
        plan_for(job, lambda _: recomputable(job, gather=True)),
    ]
    for rank, (version, outcomes) in enumerate(pool_on(job.gpus).run(on_ranks.compare_with_stock_of_release, job, plans)):
        assert version.startswith(f"{release}.")
        for outcome in outcomes:
            assert outcome.differing == []
            assert outcome.planned.frames_left == 0
        on_demand, ahead = (outcome.planned.counts[-1] for outcome in outcomes)
        assert (on_demand.in_windows, on_demand.recomputed) == (0, ahead.recomputed)
        only_loss = job.chunks == 1 and rank == job.parallel.pipeline - 1 > 0
        assert ahead.in_windows > 0 or only_loss, "only a last stage without collectives has no window"


def test_checkpoints_go_on_in_waits(pool_on, release):
    """A gradient is gathered beside them; ahead, too."""
    job = tiny_job("llama", tensor=2, sequence_parallel=True)
    late = checkpointed(plan_for(job, lambda _: ()), "layer")
    plans = [with_rest_in_wait(late), with_rest_in_wait(ahead(late, how="gather"))]
    for version, outcomes in pool_on(2).run(on_ranks.compare_with_stock_of_release, job, plans):
        assert version.startswith(f"{release}.")
        assert [outcome.differing for outcome in outcomes] == [[], []]
        assert all(outcome.planned.counts[-1].in_windows == job.model.layers * job.microbatches for outcome in outcomes)


def test_a_head_in_pieces(pool_on, release):
    job = tiny_job("gpt", tensor=2, sequence_parallel=True, tied_embeddings=False)
    for found in pool_on(2).run(compare, job, in_pieces(job), How(masked=True)):
        assert found.losses == job.microbatches
        assert found.differing.keys() == {"output_layer.weight"}, "all else is equal in every bit"
        assert found.differing["output_layer.weight"] < SMALL


def test_deferred_weight_gradients_equal_stocks_in_every_bit(pool_on, release):
    """Reduced while backward runs; the gathered input is an entry's own."""
    job = tiny_job("gpt", tensor=2, sequence_parallel=True)
    plans = [
        deferring(plan_for(job, lambda _: ()), chosen=is_forward),
        deferring(plan_for(job, lambda _: recomputable(job, gather=True))),
    ]
    trial = Trial(steps=2, training={"ddp": True, "overlap_grad_reduce": True}, model={"gradient_accumulation_fusion": True})
    for version, outcomes in pool_on(2).run(on_ranks.compare_with_stock_of_release, job, plans, trial):
        assert version.startswith(f"{release}.")
        for outcome in outcomes:
            assert outcome.differing == []
            assert outcome.planned.counts[-1].filled == outcome.planned.counts[-1].deferred > 0


def test_a_run_is_refused_there_too(pool_on):
    """Fields of TransformerConfig differ by release; what this one has is found."""
    job = tiny_job()
    [refusal] = pool_on(1).run(on_ranks.refused, job, plan_for(job, lambda _: recomputable(job)), on_ranks.rewrite_function)
    assert [place.rpartition(":")[2] for place in refusal.places] == ["MLP.forward", "_batched_p2p_ops"]
    assert refusal.changed == []


def test_what_a_release_brought_is_refused(pool_on, release):
    features = {name: value for since, fields in NEW.items() if since <= release for name, value in fields.items()}
    if not features:
        pytest.skip(f"nothing of that kind came with {release}")
    job = tiny_job()
    spoil = partial(on_ranks.set_config, **features)
    [refusal] = pool_on(1).run(on_ranks.refused, job, plan_for(job, lambda _: recomputable(job)), spoil)
    assert {*refusal.places} == {f"config.{name}" for name in features}


def test_no_tensor_stays_on_a_layer(pool_on):
    """Since 0.19 the MLP half keeps its input on the layer until it ends. A recomputation ends before: one tensor per layer
    stayed."""
    job = tiny_job()
    [left] = pool_on(1).run(on_ranks.tensors_left_on_layers, job, plan_for(job, lambda _: recomputable(job)))
    assert left == []
