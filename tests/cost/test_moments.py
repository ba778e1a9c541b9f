"""What a stage holds at every moment of a step, counted byte by byte on ranks with the real megatron-core.

What is counted beside the named parts is small, and known: what the loss has for each row (labels, masks, maxima: `ROW_BYTES`),
tables of rotary embeddings, random states that stock's recomputation remembers, counts that routers make, what gloo still
holds of an exchange.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_lynx.config import Experts
from megatron_lynx.config.parallel import Optimizer
from megatron_lynx.cost.ends import logits_at_loss_bytes
from megatron_lynx.cost.moments import Parts, StageMemory
from megatron_lynx.cost.parameters import stage_parameters
from megatron_lynx.cost.stage import chunks_in_flight
from megatron_lynx.kinds.dense.section import CORE_ATTENTION
from megatron_lynx.kinds.experts.planning import routed_rows
from megatron_lynx.kinds.planning import half_tensors
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.testbed.ranks import RankPool
from tests.config.jobs import catalogued_job
from tests.cost.moments_on_ranks import count, count_adapted, count_with_rows
from tests.instruments.compiler import COMPILER
from tests.long import long
from tests.stock.parts import stage_parts
from tests.tiny_jobs import tiny_job

SIZE = {"layers": 4, "hidden": 64, "ffn": 256, "vocab": 2048, "seq": 64, "micro": 1}
ROW_BYTES = 64
"""What the loss has for each row beside the logits: maximum, sum, predicted logit, label and mask, some of them twice."""
ROUTER_BYTES = 512
"""What a layer's router counts and logs."""
STATES_OF_A_LAYER = 6 * 5056
"""Random states that stock's recomputation remembers for each layer on this testbed."""
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

JOBS = {
    "fp32, tied": ("gpt", {}),
    "bf16": ("gpt", {"dtype": "bf16", "tied_embeddings": False}),
    "rotary, norms of eager operators": ("llama", {}),
    "pipeline": ("gpt", {"pipeline": 2, "microbatches": 3}),
    "tensor": ("gpt", {"tensor": 2, "tied_embeddings": False}),
    "interleaved": ("gpt", {"pipeline": 2, "layers_per_chunk": 2, "layers": 8, "microbatches": 4}),
    "tensor, sequence and pipeline, bf16": (
        "gpt",
        {"tensor": 2, "pipeline": 2, "sequence_parallel": True, "microbatches": 3, "dtype": "bf16"},
    ),
}

COMBINED = ("pipeline", "tensor", "bf16")
"""What another one has together."""


@pytest.mark.parametrize("name", [*(name for name in JOBS if name not in COMBINED), *long(*COMBINED)])
def test_every_moment_of_a_step_holds_what_is_predicted(own_pool_of, name):
    like, fields = JOBS[name]
    job = tiny_job(like, **{**SIZE, **fields})
    counted = own_pool_of(job.gpus).run(count, job, {})
    for stage in range(job.parallel.pipeline):
        parts = stage_parts(job.model_copy(update={"policy": "none"}), stage)
        compare(counted[stage * job.gpus // job.parallel.pipeline], parts, job, stage)


def test_a_rank_of_one_of_two_instances_holds_what_it_holds_of_one_of_its_size(own_pool_of):
    """Two of the distributed optimizer on four ranks, and one on two: at every moment, to the byte."""
    pytest.importorskip("einops", reason="Megatron makes groups of instances with it")
    counted, predicted = [], []
    for instances in (1, 2):
        layout = {"replicas": 2 * instances, "distributed_optimizer": True, "optimizer_instances": instances}
        job = tiny_job("gpt", **SIZE, **layout, microbatches=1, tied_embeddings=False)
        counted.append(own_pool_of(job.gpus).run(count, job, {})[0])
        predicted.append(stage_parts(job.model_copy(update={"policy": "none"}), 0))
    assert counted[0] == counted[1]
    assert predicted[0] == predicted[1]
    assert abs(counted[1]["forward"] - predicted[1].at("forward").total) <= ROW_BYTES * LayerShape.of(job).tokens


EXPERTS = {"count": 4, "per_token": 4, "ffn": 96}
WITH_EXPERTS = {
    "one rank, GELU": ("gpt", {"bias": False, "experts": Experts(count=4, per_token=2, ffn=48)}, {}),
    "one rank, SwiGLU beside shared experts": ("llama", {"experts": Experts(count=4, per_token=2, ffn=96, shared_ffn=48)}, {}),
    "two ranks": ("llama", {"expert": 2, "replicas": 2, "experts": Experts(**EXPERTS)}, {}),
    "two ranks, gathering": ("llama", {"expert": 2, "replicas": 2, "experts": Experts(**EXPERTS, dispatcher="allgather")}, {}),
}


ADAPTED = {
    "one rank": ("llama", {}),
    "tensor and pipeline": ("llama", {"tensor": 2, "pipeline": 2, "microbatches": 3}),
}


@pytest.mark.parametrize("name", ["one rank", *long(*(name for name in ADAPTED if name != "one rank"))])
def test_every_moment_beside_a_frozen_model(own_pool_of, name):
    """Adapters alone have gradients and states of the optimizer. The first layer's input needs no gradient, and the output
    layer's is not saved: both are counted as if they were."""
    like, fields = ADAPTED[name]
    job = tiny_job(like, **{**SIZE, **fields}, adapters={"rank": 4})
    counted = own_pool_of(job.gpus).run(count_adapted, job, {})
    for stage in range(job.parallel.pipeline):
        parts = stage_parts(job.model_copy(update={"policy": "none"}), stage)
        compare_frozen(counted[stage * job.gpus // job.parallel.pipeline], parts, job)


def compare_frozen(counted, parts, job):
    shape = LayerShape.of(job)
    block = shape.gathered_bytes
    small = ROW_BYTES * shape.tokens + 2 * job.model.seq * job.model.head_size * 4
    held = 2 * block if job.gpus > 1 else 0
    over = {moment: counted[moment] - parts.at(moment).total for moment in parts.moments}
    for moment in {"forward", "loss", "head_backward"} & over.keys():
        assert -2 * block <= over[moment] <= small + held, moment
    assert -0.1 * parts.at("backward").total <= over["backward"] <= held
    assert abs(over["reduction"]) <= small + held
    assert -small <= over["update"] <= small + held


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_every_moment_of_layers_of_experts(own_pool_of, name):
    """Rows on their way were counted as if they were always there, in updates as well; and what dispatchers remember never."""
    like, fields, megatrons = WITH_EXPERTS[name]
    job = tiny_job(like, **SIZE, **fields)
    counted = own_pool_of(job.gpus).run(count, job, megatrons)
    compare(counted[0], stage_parts(job.model_copy(update={"policy": "none"}), 0), job, 0)


def test_every_moment_where_experts_get_more_rows_on_one_rank_than_on_another(own_pool_of):
    """On each rank in the micro-batch in which its experts get most. 64 kB were once there by chance: an exchange of gloo's that
    was over, its argument and its result."""
    job = tiny_job("llama", **SIZE, expert=2, replicas=2, experts=Experts(**EXPERTS | {"per_token": 2}))
    for counted, rows in own_pool_of(2).run(count_with_rows, job, {}):
        load = rows / (job.model.layers * routed_rows(LayerShape.of(job)))
        assert load > 1.1
        experts = job.model.experts.model_copy(update={"load": load})
        loaded = job.model_copy(update={"model": job.model.model_copy(update={"experts": experts}), "policy": "none"})
        compare(counted, stage_parts(loaded, 0), loaded, 0)


@pytest.mark.parametrize("dtype", ["bf16", *long("fp32")])
def test_every_moment_of_context_parallel_ranks(own_pool_of, dtype):
    """The ring that stands in for Transformer Engine's keeps keys and values of one turn and a number for each row and head;
    Megatron's own attention, which takes no part in this, would keep scores. In 16 bits the head is no embedding: with one weight
    for both, its GEMM's scratch on CPUs (108 kB on one rank, 87 here, in all) is what the head's backward has most of."""
    tied = dtype == "fp32"
    job = tiny_job("gpt", **SIZE, context=2, attention_dropout=0.0, dtype=dtype, tied_embeddings=tied)
    counted = own_pool_of(2).run(count, job, {})
    parts, shape = stage_parts(job.model_copy(update={"policy": "none"}), 0), LayerShape.of(job)
    less = job.model.layers * (core_bytes(shape) - ring_bytes(shape))
    held = replace(parts.states, buffers=parts.states.buffers - shape.scores * job.model.element_bytes)
    compare(counted[0], replace(parts, states=held, activations=parts.activations - less, chunk=parts.chunk - less), job, 0)


def core_bytes(shape):
    """What Megatron's own core attention keeps for itself."""
    saved = [tensor for tensor in half_tensors(shape, "attention") if (tensor.made_by, *tensor.saved_by) == 2 * (CORE_ATTENTION,)]
    return sum(tensor.bytes for tensor in saved)


def ring_bytes(shape):
    """What the ring of CPU ranks keeps in its place: keys and values of one turn, and a number for each row and head."""
    return 2 * shape.tokens * shape.key_width * shape.model.element_bytes + 4 * shape.tokens * shape.model.heads


def compare(counted, parts, job, stage):
    shape = LayerShape.of(job)
    tables = 2 * job.model.seq * job.model.head_size * 4 if job.model.position == "rope" else 0
    small = ROW_BYTES * shape.tokens + tables
    held = 2 * shape.gathered_bytes if job.gpus > 1 else 0  # by gloo, of exchanges that are over
    if job.model.experts is not None:
        small += ROUTER_BYTES * job.model.layers
        held += 4 * routed_rows(shape) * job.model.hidden * 4 if job.parallel.expert > 1 else 0
    if (
        job.chunks > 1
    ):  # chunks' outputs, which are let go of when they are sent, but not here: gloo would send what is there by then
        held += (chunks_in_flight(job, stage) + 4) * shape.gathered_bytes
        assert (counted["forward"] - parts.at("forward").total) % shape.gathered_bytes <= small
    held_forward = 0 if job.parallel.expert > 1 else held  # there `count` makes gloo let go
    norm = shape.gathered_bytes if job.model.norm == "rmsnorm" else 0  # its product
    over = {moment: counted[moment] - parts.at(moment).total for moment in parts.moments}
    assert -small * (job.model.experts is not None) <= over["forward"] <= small + held_forward
    if "loss" in over:
        assert 0 <= over["loss"] <= small + norm + held
        assert -shape.gathered_bytes - parts.running["messages"] <= over["head_backward"] <= small + norm + held
    if "embedding_backward" in over:
        assert -shape.gathered_bytes <= over["embedding_backward"] <= held + small + shape.gathered_bytes
    assert over["backward"] <= held
    assert abs(over["reduction"]) <= small + held
    root = 4 * stage_parameters(job, stage).largest  # of the parameter before: it need not be as large as the largest
    assert -root - small <= over["update"] <= small + held
    assert counted["first_update"] <= counted["update"] + small, "what is allocated then is there ever after"


@pytest.mark.parametrize("context", [*long(1), 2])
def test_norms_of_eager_operators_read_a_copy_of_what_halves_are_given(own_pool_of, context):
    """In 16 bits RMSNorm copies its input in fp32 and keeps that. So nobody keeps the inputs of halves, which are predicted on
    whatever device: too much here, by as many bytes, which once seemed to be context-parallel ranks'."""
    job = tiny_job("llama", **SIZE, context=context, attention_dropout=0.0, dtype="bf16").model_copy(update={"policy": "none"})
    counted, parts, shape = own_pool_of(context).run(count, job, {})[0], stage_parts(job, 0), LayerShape.of(job)
    scores = core_bytes(shape) - ring_bytes(shape) if context > 1 else 0
    unused = shape.scores * job.model.element_bytes if context > 1 else 0
    less = job.model.layers * (2 * shape.input_bytes + scores) + unused
    over = counted["forward"] - (parts.at("forward").total - less)
    tables = 2 * job.model.seq * job.model.head_size * 4
    assert 0 <= over <= shape.input_bytes + tables + ROW_BYTES * shape.tokens, "what the first layer is given stays"


@pytest.mark.parametrize("dtype", [*long("fp32"), "bf16"])
def test_a_layer_made_again_is_never_there_together_with_the_logits(own_pool_of, dtype):
    job = tiny_job("gpt", **SIZE, dtype=dtype, tied_embeddings=False).model_copy(update={"policy": "full"})
    (counted,) = own_pool_of(1).run(count, job, FULL)
    parts = stage_parts(job, 0)
    states = STATES_OF_A_LAYER * job.model.layers
    small = ROW_BYTES * job.model.seq
    for moment in ("forward", "loss"):
        assert 0 <= counted[moment] - parts.at(moment).total - states <= small
    made_again = counted["backward"] - parts.states.total - parts.activations - parts.running["embedding"] - states
    assert parts.recomputed < made_again <= parts.recomputed + parts.at("backward").in_hand + small
    together = parts.at("loss").total + parts.recomputed + states
    assert max(counted["loss"], counted["backward"]) < together


def test_copies_of_gradients_in_16_bits_are_there_in_updates_alone(own_pool_of):
    job = tiny_job("gpt", **SIZE, dtype="bf16", tied_embeddings=False)
    less = job.model_copy(update={"optimizer": Optimizer(gradients="bf16")})
    (whole,), (half,) = (own_pool_of(1).run(count, each, {}) for each in (job, less))
    parameters = stage_parameters(job, 0).total
    small = ROW_BYTES * job.model.seq
    assert whole["forward"] - half["forward"] == pytest.approx(2 * parameters, abs=small)
    assert half["update"] - whole["update"] == pytest.approx(2 * parameters, abs=small), "2 less each, and a copy of 4"
    parts = stage_parts(less.model_copy(update={"policy": "none"}), 0)
    assert parts.at("update").update_copies == 4 * parameters
    assert 0 <= half["forward"] - parts.at("forward").total <= small
    assert 0 <= parts.at("update").total - half["update"] + small <= 4 * stage_parameters(less, 0).largest + 2 * small


LOSS = {"layers": 2, "hidden": 32, "ffn": 64, "vocab": 4096, "seq": 64, "micro": 1, "tied_embeddings": False}


@pytest.mark.parametrize("dtype", ["bf16", *long("fp32")])
def test_what_megatrons_fused_loss_holds(own_pool_of, dtype):
    job = tiny_job("gpt", **LOSS, dtype=dtype, cross_entropy="native")
    (counted,) = own_pool_of(1).run(count, job, {})
    predicted = stage_parts(job.model_copy(update={"policy": "none"}), 0).at("loss").total
    assert 0 <= counted["loss"] - predicted <= ROW_BYTES * job.model.seq


@pytest.mark.streams
def test_compiled_it_copies_its_softmax():
    """On GPUs `jit_fuser` is on: there 10 bytes a logit are predicted, in place of 6."""
    job = tiny_job("gpt", **LOSS, dtype="bf16", cross_entropy="native").model_copy(update={"policy": "none"})
    with RankPool(1, env={COMPILER: "inductor"}) as pool:
        (counted,) = pool.run(count, job, {})
    copy = 4 * job.model.seq * job.model.vocab
    assert 0 <= counted["loss"] - stage_parts(job, 0).at("loss").total - copy <= ROW_BYTES * job.model.seq


def test_bytes_of_a_logit_by_the_kind_of_loss():
    shape = LayerShape.of(catalogued_job("llama3-8b", "h100-80g", gpus=8, batch=8, parallel={"tensor": 1}))
    logits = shape.tokens * shape.model.vocab
    kinds = {kind: replace(shape, model=shape.model.model_copy(update={"cross_entropy": kind})) for kind in KINDS}
    assert {kind: logits_at_loss_bytes(each) // logits for kind, each in kinds.items()} == KINDS


KINDS = {"unfused": 6, "native": 10, "te": 4}


def test_the_fullest_moment_is_the_one_that_is_named():
    beside = {
        "forward": {"head": 1},
        "loss": {"head": 2, "logits": 7},
        "backward": {"in_hand": 3},
        "update": {"update_copies": 1},
    }
    parts = Parts(StageMemory(parameters=10), beside, activations=5, recomputed=8)
    fullest = parts.fullest
    assert fullest.moment == "backward"
    assert fullest.total == 10 + 5 + 8 + 3 == fullest.totals["backward"]
    assert fullest.totals["loss"] == 10 + 5 + 2 + 7
    assert fullest.logits == 0, "gone by then"
    assert list(fullest.totals) == [*beside], "in the order of a step"


def test_on_gpus_only_weights_of_local_layers_have_their_blocks_in_hand():
    """Transformer Engine keeps one for each shape of weight, and one for the head's."""
    layout = {"tensor": 2, "pipeline": 8, "sequence_parallel": True}
    job = catalogued_job(parallel=layout)
    te = job.model_copy(update={"model": job.model.model_copy(update={"implementation": "transformer_engine"})})
    local, kept = (stage_parts(each, 7) for each in (job, te))
    model = job.model
    layer = 2 * (model.hidden * (model.qkv_width + model.hidden + model.fc1_width + model.ffn) // 2)
    head = 2 * model.vocab * model.hidden // 2
    gathered = LayerShape.of(job).gathered_bytes
    assert local.states.buffers == gathered
    assert kept.states.buffers == layer + head
    assert local.at("head_backward").in_hand - kept.at("head_backward").in_hand == head
    assert kept.fullest.buffers == layer + head, "an earlier step has made them, and they stay"
    assert kept.fullest.always + kept.fullest.buffers <= min(kept.fullest.totals.values())
