"""Weight gradients of Transformer Engine's linears that are deferred, BF16 and FP8: its own Python of each release, its compiled
extension stood in for. Every bit stays stock's. Not run on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from megatron_lynx.anatomy import ATTENTION, EXPERTS, EXPERTS_LINEARS
from megatron_lynx.anatomy import LINEARS as DENSE_LINEARS
from megatron_lynx.anatomy.address import is_forward
from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan
from megatron_lynx.testbed.ranks import RankPool
from tests.deferring import deferring
from tests.tiny_jobs import tiny_job

from ..long import long
from ..te_releases import pool_with, pools_with
from ..transparency.offloaded import offloading
from ..transparency.plans import plan_for, recomputable
from ..transparency.test_deferring_experts import LINEARS, into_exchanges, plans
from ..transparency.test_experts import STATEFUL
from ..transparency.test_pieces import in_pieces
from ..transparency.test_weight_gradients import counts_of
from ..transparency.trials import Trial
from . import on_ranks

FUSED: dict[str, Any] = {"gradient_accumulation_fusion": True}
OVERLAPPED = {"ddp": True, "overlap_grad_reduce": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": {"tensor": 2},
    "TP2+SP": {"tensor": 2, "sequence_parallel": True},
    "PP2xVPP2": {"pipeline": 2, "microbatches": 4, "layers_per_chunk": 1},
}
RECIPES = (None, "delayed", "tensorwise")
HELD: dict[str, Any] = {"fp8": {"recipe": "tensorwise", "parameters": True}, "distributed_optimizer": True}


def te_job(recipe: str | None, like: Any, layout: str) -> Job:
    fields = LAYOUTS[layout] | ({} if recipe is None else {"fp8": {"recipe": recipe}})
    return tiny_job(like, implementation="transformer_engine", dtype="bf16", **fields)


def plans_of(job: Job) -> list[Plan]:
    """Kept, deferred into whatever comes later; and recomputed."""
    gather = job.parallel.sequence_parallel
    windows = not (gather and job.model.fp8_recipe == "tensorwise")  # its amaxes are reduced in every call
    recomputed = plan_for(job, lambda layer: recomputable(job, gather=gather), windows=windows)
    later = (lambda wait: True) if job.parallel.tensor == 1 else is_forward
    return [deferring(plan_for(job, lambda layer: ()), chosen=later), deferring(recomputed)]


@pytest.fixture(scope="module")
def pool_of() -> Iterator[Callable[[int], RankPool]]:
    yield from pools_with("2.9")


@pytest.mark.parametrize(
    ("layout", "recipe"),
    [
        ("TP2+SP", "tensorwise"),  # `test_other_releases` has `delayed` in this layout
        ("PP2xVPP2", "delayed"),
        *long(
            ("TP2+SP", None),
            ("TP2+SP", "delayed"),
            ("PP2xVPP2", None),
            ("PP2xVPP2", "tensorwise"),
            *(("TP2", recipe) for recipe in RECIPES),
        ),
    ],
)
def test_into_waits(pool_of, layout, recipe):
    """Biases of the GPT, whose gradients the same GEMM makes, with gradients reduced in backward; and without either."""
    for like, training in (("gpt", OVERLAPPED), ("llama", {"ddp": True})):
        job = te_job(recipe, like, layout)
        for both in counts_of(pool_of, job, plans_of(job), Trial(training=training, model=FUSED)):
            assert all(counts.filled > 0 for counts in both)


def test_of_weights_that_are_held_in_fp8(pool_of):
    """`main_grad` and its flags are on the parameter, which is a wrapper around bytes."""
    job = tiny_job("llama", implementation="transformer_engine", dtype="bf16", **LAYOUTS["TP2"], **HELD)
    trial = Trial(steps=2, training=OVERLAPPED | {"optimizer": "megatron"}, model=FUSED)
    for both in counts_of(pool_of, job, plans_of(job), trial):
        assert all(counts.filled > 0 for counts in both)


def test_beside_offloading(pool_of):
    job = te_job("delayed", "llama", "PP2xVPP2")
    [first, _] = counts_of(pool_of, job, [offloading(plans_of(job)[0], 8_000)], Trial(training={"ddp": True}, model=FUSED))
    assert first[0].offloaded_bytes > 0
    assert first[0].filled > 0


@pytest.mark.parametrize(("release", "core"), [*long(("2.14", "0.17"), ("2.20", "0.18")), ("2.17", "0.19")])
def test_other_releases(release, core):
    with pool_with(release, 2, core) as pool:
        for recipe in (None, "delayed"):
            job = te_job(recipe, "gpt", "TP2+SP")
            for both in counts_of(lambda ranks: pool, job, plans_of(job), Trial(training=OVERLAPPED, model=FUSED)):
                assert all(counts.filled == counts.deferred > 0 for counts in both)


def check_pieces(pool: RankPool) -> None:
    """Of BF16, with gradients reduced in backward."""
    job = te_job(None, "llama", "TP2+SP")
    cut = [in_pieces(plan, dict.fromkeys(DENSE_LINEARS, 2)) for plan in plans_of(job)]
    trial = Trial(training=OVERLAPPED, model=FUSED)
    for both in counts_of(lambda ranks: pool, job, [*plans_of(job), *cut], trial):
        assert [counts.deferred for counts in both[2:]] == [2 * counts.deferred for counts in both[:2]]
        assert all(counts.filled > 0 for counts in both)


def test_in_pieces(pool_of):
    check_pieces(pool_of(2))


@pytest.mark.parametrize(("release", "core"), long(("2.20", "0.18"), ("2.14", "0.17"), ("2.17", "0.19")))
def test_in_pieces_of_other_releases(release, core):
    with pool_with(release, 2, core) as pool:
        check_pieces(pool)


def experts_job() -> Job:
    experts = {"count": 4, "per_token": 2, "ffn": 32, "shared_ffn": 32}
    fields = {"layers": 2, "replicas": 2, "expert": 2, "experts": experts, "bias": False, "dtype": "bf16"}
    return tiny_job("gpt", implementation="transformer_engine", **fields)


def check_experts(pool_of: Callable[[int], RankPool], *, grouped: bool) -> None:
    """Every linear of a layer, while tokens travel; with few bytes; reduced in backward. Other tokens in every step."""
    job = experts_job()
    kept, recomputed = plans(job)
    candidates = [deferring(kept, LINEARS, into_exchanges), deferring(recomputed, LINEARS, into_exchanges, most_bytes=9_000)]
    model = FUSED | STATEFUL | {"moe_grouped_gemm": grouped}
    trial = Trial(training=OVERLAPPED | {"optimizer": "megatron"}, model=model, steps=3)
    entries = len(LINEARS) if grouped else len(LINEARS) + len(EXPERTS_LINEARS)
    for whole, bounded in counts_of(pool_of, job, candidates, trial):
        assert whole.deferred == entries * job.model.layers * (job.microbatches - 1), "a grouped GEMM is one entry"
        assert whole.filled > bounded.filled > 0
        assert bounded.deferred_bytes <= 9_000


def test_experts_in_groups(pool_of):
    """The GEMMs of one of a rank's two experts, then those of the other one."""
    job = experts_job()
    plan = deferring(plans(job)[0], EXPERTS.linears, into_exchanges)
    cut = in_pieces(plan, dict.fromkeys(EXPERTS.linears, 2))
    model = FUSED | STATEFUL | {"moe_grouped_gemm": True}
    trial = Trial(training=OVERLAPPED | {"optimizer": "megatron"}, model=model, steps=3)
    for whole, pieces in counts_of(pool_of, job, [plan, cut], trial):
        assert pieces.deferred == 2 * whole.deferred > 0
        assert pieces.filled > whole.filled


@pytest.mark.parametrize("grouped", [True, *long(False)])
def test_experts(pool_of, grouped):
    check_experts(pool_of, grouped=grouped)


@pytest.mark.parametrize(("release", "core"), long(("2.14", "0.17"), ("2.20", "0.18"), ("2.17", "0.19")))
def test_experts_of_other_releases(release, core):
    with pool_with(release, 2, core) as pool:
        check_experts(lambda ranks: pool, grouped=True)


NATIVE = "NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM"
NOT_DEFERRED: dict[str, tuple[dict[str, Any], str]] = {
    "the environment asks for tensors of all experts": ({"environ": {NATIVE: "1"}}, f"found {NATIVE}, needed off"),
    "so does the module": ({"use_grouped_tensor": True}, f"found {NATIVE}, needed off"),
    "biases": ({"apply_bias": True}, "apply_bias: found True, needed False"),
}


@pytest.mark.parametrize("why", NOT_DEFERRED)
def test_grouped_experts_whose_weight_gradients_cannot_be_deferred(pool_of, why):
    asked, said = NOT_DEFERRED[why]
    check_refused(pool_of(2), said, **asked)


@pytest.mark.parametrize(("release", "core"), long(("2.14", "0.17"), ("2.17", "0.19"), ("2.20", "0.18")))
def test_grouped_experts_as_these_releases_make_them(release, core):
    """Modules of 2.20 read the environment when they are made, the others when they run."""
    with pool_with(release, 2, core) as pool:
        asked, said = NOT_DEFERRED["the environment asks for tensors of all experts"]
        check_refused(pool, said, **asked)


def check_refused(pool: RankPool, said: str, **asked: Any) -> None:
    """A plan that defers inside experts is refused with these words, one that defers beside them is not. (Here both are, for
    another reason: gradients are not added up where they lie.)"""
    job = experts_job()
    kept, _ = plans(job)
    spoil = partial(on_ranks.grouped_experts, **{"environ": {}, **asked})
    for linears, refused in ((EXPERTS.linears, True), (ATTENTION.linears, False)):
        for refusal in pool.run(on_ranks.refused, job, deferring(kept, linears, into_exchanges), spoil):
            assert refusal.changed == []
            assert (said in str(refusal.error)) == refused
