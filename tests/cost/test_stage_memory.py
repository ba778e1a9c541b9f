"""What a device holds: chunks in flight against the schedules, parts against formulas, offloading against its own account."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron_lynx.config import Job
from megatron_lynx.config.model import Fp8
from megatron_lynx.cost.parameters import bytes_each, stage_parameters
from megatron_lynx.cost.recompute import kept_bytes
from megatron_lynx.cost.stage import chunks_in_flight
from megatron_lynx.cost.update import update_s
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.schedule.flushes import with_flushes
from tests.config.jobs import catalogued_job
from tests.stock.parts import memory_of_stages, stage_parts
from tests.tiny_jobs import tiny_job

STAGES = range(8)


def most_in_flight(orders) -> list[int]:
    """Counted in the schedule's own order of forwards and backwards."""
    steps = {"F": 1, "B": -1}
    return [max(accumulate(steps[action.kind] for action in order)) for order in orders]


@pytest.mark.parametrize("microbatches", [8, 16, 40])
def test_chunks_in_flight_are_what_the_interleaved_order_leaves_open(microbatches: int) -> None:
    job = catalogued_job(gpus=16, batch=microbatches)
    orders = with_flushes(8, microbatches, job.chunks).orders
    assert [chunks_in_flight(job, stage) for stage in STAGES] == most_in_flight(orders)


@pytest.mark.parametrize("microbatches", [2, 4, 9])
def test_chunks_in_flight_are_what_1f1b_leaves_open(microbatches: int) -> None:
    job = tiny_job(pipeline=4, microbatches=microbatches)
    orders = with_flushes(4, microbatches).orders
    assert [chunks_in_flight(job, stage) for stage in range(4)] == most_in_flight(orders)


@pytest.mark.parametrize("microbatches", [4, 12, 40])
@pytest.mark.parametrize(
    "partition", [(2, 10, 13, 10, 10, 10, 15, 10), (10, 10, 10, 15, 5, 10, 10, 10), (1, 6, 6, 7, 7, 7, 9, 7, 9, 8, 8, 5)]
)
def test_chunks_of_unequal_layers_were_all_counted_as_the_largest(partition: tuple[int, ...], microbatches: int) -> None:
    """A recipe whose layout has one chunk of three layers (llama3-70b on 64 H100) "did not fit": 41 chunks of three were counted
    where at most nine of them are in flight."""
    layout = {"tensor": 2, "pipeline": 4, "sequence_parallel": True, "partition": partition}
    job = catalogued_job(parallel=layout, gpus=8, batch=microbatches, policy="none")
    layer = kept_bytes(LayerShape.of(job))
    for stage, order in enumerate(with_flushes(4, microbatches, job.chunks).orders):
        steps = ((1 if action.kind == "F" else -1) * job.chunk_layers(stage)[action.chunk] for action in order)
        assert stage_parts(job, stage).activations == max(accumulate(steps)) * layer


def test_the_first_of_two_stages_by_hand() -> None:
    """Two layers of width 32 on each stage, GPT-like, fp32: every weight counted."""
    first, last = (stage_parameters(tiny_job(pipeline=2), stage) for stage in range(2))
    assert first.matrices == last.matrices == 2 * (32 * 96 + 32 * 32 + 2 * 32 * 64)
    assert first.vectors == 2 * (4 * 32 + (96 + 32) + (64 + 32))
    assert last.vectors == first.vectors + 2 * 32
    normed = stage_parameters(tiny_job(pipeline=2, qk_norm=True), 0)
    assert normed.vectors == first.vectors + 2 * 2 * (2 * 8), "one norm of a head's width for queries, one for keys"
    assert first.embedding == (64 + 16) * 32
    assert last.head == 64 * 32, "tied embeddings are held on both ends"
    assert stage_parameters(tiny_job(), 0).head == 0
    memory = stage_parts(priced(tiny_job(pipeline=2)), 0).fullest
    assert memory.parameters == memory.gradients == memory.optimizer // 2 == 4 * first.total


def priced(job: Job, policy: str = "none") -> Job:
    return job.model_copy(update={"policy": policy})


def test_optimizer_state_is_shared_by_all_that_hold_the_same_parameters() -> None:
    layout = {"tensor": 2, "context": 2, "pipeline": 8, "layers_per_chunk": 2, "sequence_parallel": True}
    alone = stage_parts(catalogued_job(parallel=layout), 0).fullest
    shared = stage_parts(catalogued_job(parallel={**layout, "distributed_optimizer": True}), 0).fullest
    assert alone.optimizer == 6 * alone.parameters
    assert shared.optimizer == alone.optimizer / (2 * 8)


@pytest.mark.parametrize(
    ("optimizer", "gradient", "state"),
    [
        ({}, 4, 12),  # Megatron's table: 6 + 12/d
        ({"gradients": "bf16"}, 2, 12),  # 4 + 12/d, and 4/d in updates
        ({"precision_aware": True, "main_parameters": "remainder"}, 4, 10),
        ({"precision_aware": True, "main_parameters": "remainder", "gradients": "bf16"}, 2, 10),
        ({"precision_aware": True, "main_parameters": "fp16", "first_moment": "fp8", "second_moment": "bf16"}, 4, 5),
    ],
)
def test_bytes_of_gradients_and_optimizer_by_their_types(optimizer: dict, gradient: int, state: int) -> None:
    layout = {"tensor": 2, "pipeline": 8, "sequence_parallel": True, "distributed_optimizer": True}
    job = catalogued_job(parallel=layout, optimizer=optimizer)
    memory, count = stage_parts(job, 0).fullest, stage_parameters(job, 0).total
    assert (memory.parameters, memory.gradients) == (2 * count, gradient * count)
    assert memory.optimizer == -(-state * count // job.replicas)


@pytest.mark.parametrize(
    ("optimizer", "copies"),
    [
        ({}, 0),
        ({"gradients": "bf16"}, 4),
        ({"precision_aware": True, "gradients": "bf16"}, 0),  # Transformer Engine's Adam reads them as they are
        ({"precision_aware": True, "main_parameters": "fp16", "first_moment": "fp8", "second_moment": "bf16"}, 12),
    ],
)
def test_copies_in_fp32_are_made_in_updates_alone(optimizer: dict, copies: int) -> None:
    layout = {"tensor": 2, "pipeline": 8, "sequence_parallel": True, "distributed_optimizer": True}
    job = catalogued_job(parallel=layout, optimizer=optimizer)
    parts, count = stage_parts(job, 0), stage_parameters(job, 0).total
    held = -(-copies * count // job.replicas)
    assert parts.at("update").total == parts.states.total + held
    assert parts.at("backward").update_copies == 0
    assert parts.at("first_update") == parts.at("update")


def test_copies_of_weights_in_fp8() -> None:
    """Two bytes a weight of a linear on a Hopper, whose GEMMs read rows; one where they read columns as well."""
    layout = {"tensor": 2, "pipeline": 8, "sequence_parallel": True}
    job = catalogued_job(parallel=layout, fp8="delayed")
    memory, matrices = stage_parts(job, 0).fullest, stage_parameters(job, 0).matrices
    scales = 10 * 4 * 4
    assert memory.fp8_weights == 2 * matrices + scales
    assert memory.always == stage_parts(catalogued_job(parallel=layout), 0).fullest.always + memory.fp8_weights
    units = job.cluster.fp8.model_copy(update={"transposes": False})
    other = job.model_copy(update={"cluster": job.cluster.model_copy(update={"fp8": units})})
    assert stage_parts(other, 0).fullest.fp8_weights == matrices + scales


def test_weights_that_are_held_in_fp8() -> None:
    """A byte each, and a second one by columns on a Hopper; what steps them is as ever. The gather moves half as much."""
    layout = {"tensor": 2, "pipeline": 8, "sequence_parallel": True, "distributed_optimizer": True}
    copied = catalogued_job(parallel=layout, fp8="delayed")
    held = copied.model_copy(update={"model": copied.model.model_copy(update={"fp8": Fp8(parameters=True)})})
    before, memory, matrices = stage_parts(copied, 0).fullest, stage_parts(held, 0).fullest, stage_parameters(held, 0).matrices
    assert before.parameters - memory.parameters == matrices
    assert before.fp8_weights - memory.fp8_weights == matrices
    assert (memory.gradients, memory.optimizer) == (before.gradients, before.optimizer)
    assert update_s(held, analytic_profile(held)) < update_s(copied, analytic_profile(copied))


def test_layers_that_stay_in_bf16_at_the_ends_of_a_model_in_fp8() -> None:
    """They are counted where they are: two on the first stage, for each micro-batch in flight, one on the last."""
    layout = {"tensor": 2, "pipeline": 8, "sequence_parallel": True}
    usual = catalogued_job(parallel=layout, fp8="tensorwise", policy="none")
    ends = Fp8(recipe="tensorwise", first_in_bf16=2, last_in_bf16=1)
    job = usual.model_copy(update={"model": usual.model.model_copy(update={"fp8": ends})})
    plain = usual.model_copy(update={"model": usual.model.model_copy(update={"fp8": None})})
    beyond = kept_bytes(LayerShape.of(plain)) - kept_bytes(LayerShape.of(usual))
    more = [stage_parts(job, stage).fullest.total - stage_parts(usual, stage).fullest.total for stage in range(8)]
    copies = stage_parts(usual, 0).fullest.fp8_weights // usual.layers_on(0)
    assert more[1:7] == [0] * 6
    assert (more[0], more[7]) == (2 * (8 * beyond - copies), beyond - copies)
    profiles = [analytic_profile(each) for each in (usual, job, plain)]
    in_fp8, mixed, in_bf16 = ((one.attention.forward_s + one.mlp.forward_s, one.embedding, one.head) for one in profiles)
    assert mixed[0] == in_fp8[0]
    assert mixed[1].forward_s - in_fp8[1].forward_s == pytest.approx(2 * (in_bf16[0] - in_fp8[0]))
    assert mixed[2].forward_s - in_fp8[2].forward_s == pytest.approx(in_bf16[0] - in_fp8[0])


def test_a_precision_aware_optimizer_beside_scales_of_now_holds_main_parameters_in_fp32() -> None:
    """Megatron steps those then, from copies of gradients (`use_precision_aware_optimizer_no_fp8_or_ds_fp8`)."""
    layout = {"tensor": 2, "pipeline": 8, "sequence_parallel": True, "distributed_optimizer": True}
    optimizer = {"precision_aware": True, "gradients": "bf16", "main_parameters": "remainder", "first_moment": "bf16"}
    delayed, tensorwise = (
        bytes_each(catalogued_job(parallel=layout, fp8=recipe, optimizer=optimizer)) for recipe in ("delayed", "tensorwise")
    )
    assert (delayed.main_parameter, delayed.gradient_copy) == (2, 0)
    assert (tensorwise.main_parameter, tensorwise.gradient_copy) == (4, 4)
    assert (delayed.moments, tensorwise.moments) == (6, 6), "moments are held in the types that are asked for, with any recipe"


def test_gradients_of_two_bytes_are_reduced_in_less_time() -> None:
    layout = {"tensor": 2, "pipeline": 8, "sequence_parallel": True, "distributed_optimizer": True}
    jobs = [catalogued_job(parallel=layout, optimizer={"gradients": held}) for held in ("bf16", "fp32")]
    updates = [update_s(job, analytic_profile(job)) for job in jobs]
    assert updates == sorted(updates)


@pytest.mark.parametrize(
    ("optimizer", "named"),
    [
        ({"first_moment": "bf16"}, "first_moment bf16 needs precision_aware"),
        ({"precision_aware": True}, "needs parallel.distributed_optimizer"),
    ],
)
def test_states_that_megatron_does_not_hold_are_refused(optimizer: dict, named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        catalogued_job(parallel={"tensor": 2, "pipeline": 8}, optimizer=optimizer)


def test_context_ranks_share_a_sequence() -> None:
    cut = {"tensor": 2, "context": 2, "pipeline": 8, "layers_per_chunk": 2, "sequence_parallel": True}
    half, whole = (stage_parts(job, 0).chunk for job in (catalogued_job(parallel=cut), catalogued_job()))
    assert half == pytest.approx(whole / 2)


LAYOUTS = st.tuples(
    st.sampled_from([("gpt-22b", 48), ("llama2-70b", 80), ("llama-7b", 32)]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2]),
)


@settings(max_examples=25, deadline=None)
@given(LAYOUTS)
def test_more_recomputed_is_less_kept(layout) -> None:
    (model, layers), tensor, context, pipeline, chunks = layout
    parallel = {"tensor": tensor, "context": context, "pipeline": pipeline, "sequence_parallel": tensor > 1}
    if pipeline > 1:
        parallel["layers_per_chunk"] = layers // (pipeline * chunks)
    plain = catalogued_job(model, gpus=tensor * context * pipeline * 2, batch=2 * pipeline, parallel=parallel)
    jobs = [priced(plain, policy) for policy in ("none", "selective", "full")]
    kept = [[memory.activations for memory in memory_of_stages(job)] for job in jobs]
    assert all(none >= selective >= full for none, selective, full in zip(*kept, strict=True))


def test_every_byte_of_the_total_is_named() -> None:
    for stage in STAGES:
        memory, parts = stage_parts(catalogued_job(), stage).fullest, stage_parts(catalogued_job(), stage)
        named = memory.named
        assert named.pop("total") == sum(named.values()) == memory.totals[memory.moment] == max(memory.totals.values())
        assert (stage == 7) == ("loss" in memory.totals)
        assert memory.totals == {moment: parts.at(moment).total for moment in parts.moments}


def without_flushes(**fields):
    layout = {"tensor": 2, "pipeline": 4, "distributed_optimizer": True}
    return catalogued_job("llama-7b", "a100-80g", gpus=16, batch=16, parallel=layout, **fields)


def test_two_versions_on_every_stage_and_two_gradients_on_all_but_the_first() -> None:
    flushing, deferred = without_flushes(), without_flushes(schedule="double_buffered")
    at_once = without_flushes(schedule="double_buffered", defer_updates=False)
    for stage in range(4):
        before, after, no_second = (stage_parts(job, stage).fullest for job in (flushing, deferred, at_once))
        assert (before.second_weights, before.second_gradients) == (0, 0)
        assert after.second_weights == no_second.second_weights == before.parameters
        assert after.second_gradients == (0 if stage == 0 else before.gradients)
        assert no_second.second_gradients == 0
        assert after.total == before.total + after.second_weights + after.second_gradients
        assert after.always == before.always + after.second_weights + after.second_gradients
        assert after.activations == before.activations, "p - s micro-batches, as with flushes"


def test_an_update_without_flushes_copies_the_weights_once_more() -> None:
    flushing, deferred = without_flushes(), without_flushes(schedule="double_buffered")
    weights = max(stage_parameters(flushing, stage).total for stage in range(4)) * 2
    once_s, copied_s = (update_s(job, analytic_profile(job)) for job in (flushing, deferred))
    assert copied_s - once_s == pytest.approx(2 * weights / flushing.cluster.hbm.byte_per_s)


def test_gathered_tokens_are_in_hand_once_more() -> None:
    """Where all tokens of eight ranks come to each: in Megatron's buffer, and as sums on their way back, in place of rows that
    an all-to-all sends, of which each token has two."""
    layout = {"tensor": 1, "pipeline": 4, "expert": 8, "distributed_optimizer": True}
    job = catalogued_job("mixtral-8x7b", "h100-80g", gpus=64, parallel=layout, policy="none")
    experts = job.model.experts.model_copy(update={"dispatcher": "allgather"})
    gathering = job.model_copy(update={"model": job.model.model_copy(update={"experts": experts})})
    sent, gathered = (stage_parts(each, 0).at("backward").total for each in (job, gathering))
    token_bytes = 4096 * 4096 * 2
    assert gathered - sent == (2 * 8 - 2) * token_bytes
