"""Profiles without measuring: by hand where it is simple, else how they must change with shape and cluster."""

from __future__ import annotations

import pytest

from megatron_lynx.anatomy import MLP
from megatron_lynx.config.job import Lengths
from megatron_lynx.config.model import Fp8
from megatron_lynx.config.parallel import Overlap
from megatron_lynx.cost.communication import window_lengths_s
from megatron_lynx.cost.moments import layer_in_hand_bytes
from megatron_lynx.cost.parameters import passed_weights
from megatron_lynx.errors import ConfigError
from megatron_lynx.kinds.core_attention import ordered_bytes
from megatron_lynx.kinds.planning import flops_of, half_tensors
from megatron_lynx.planner import make_plan
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.profile import shape_of
from megatron_lynx.profiler.roofline import Roofline
from megatron_lynx.profiler.shape import LayerShape
from tests.config.jobs import catalogued_job
from tests.tiny_jobs import tiny_job


def gpt_22b(**layout):
    return catalogued_job("gpt-22b", "a100-80g", gpus=8, micro=4, batch=4, parallel={"tensor": 8, **layout}, policy="none")


def test_a_gemm_takes_its_flops_over_the_rate_that_its_size_reaches():
    job = catalogued_job("gpt-530b", "a100-80g", gpus=8, batch=4, parallel={"tensor": 8}, policy="none")
    item = analytic_profile(job).mlp.items["linear_fc2"]
    rows, inner, width = 2048, 20480, 4 * 20480 // 8
    size, matmul = (rows * inner * width) ** (1 / 3), job.cluster.matmul
    reached = matmul.efficiency * size / (size + matmul.half_size)
    expected = 2 * rows * inner * width / (reached * 312e12)
    assert item.forward_s == pytest.approx(expected + job.cluster.hbm.latency_us * 1e-6)
    assert item.backward_s == item.dgrad_s + item.wgrad_s == pytest.approx(2 * item.forward_s)


@pytest.mark.parametrize("layout", [{}, {"sequence_parallel": True}])
def test_what_stock_hides_behind_a_linear_slows_it_by_a_share(layout):
    """The gradient's reduction beside the wgrad; under sequence parallelism the input's gather beside the dgrad as well."""
    job = gpt_22b(**layout)
    alone = job.cluster.model_copy(update={"matmul": job.cluster.matmul.model_copy(update={"beside_collective": 0.0})})
    profile, free = analytic_profile(job), analytic_profile(job.model_copy(update={"cluster": alone}))
    size, kinds = LayerShape.of(job).gathered_bytes, ("all_gather", "reduce_scatter") if layout else (None, "all_reduce")
    beside_s = [profile.link_s(kind, size) if kind else 0.0 for kind in kinds]
    slowed, plain = profile.attention.items["linear_qkv"], free.attention.items["linear_qkv"]
    assert [slowed.dgrad_s - plain.dgrad_s, slowed.wgrad_s - plain.wgrad_s] == pytest.approx([0.33 * each for each in beside_s])
    assert slowed.backward_s == slowed.dgrad_s + slowed.wgrad_s
    assert profile.attention.items["linear_proj"] == free.attention.items["linear_proj"]
    assert profile.interference == pytest.approx(1 / 0.67)


def test_a_gemm_is_slowed_no_longer_than_it_runs():
    roof = Roofline.of(gpt_22b())
    assert roof.slowed_s(1.0, 100.0) == pytest.approx(1 / 0.67)
    assert roof.slowed_s(1.0, 0.0) == 1.0


def test_a_norm_takes_its_bytes_over_the_achieved_bandwidth():
    job = gpt_22b()
    moved = 2 * (2 * 2048 * 4 * 6144)
    hbm = job.cluster.hbm
    assert analytic_profile(job).attention.items["input_layernorm"].forward_s == pytest.approx(
        moved / (2039e9 * hbm.efficiency) + hbm.latency_us * 1e-6
    )


def test_a_linear_in_fp8_is_twice_as_fast_and_pays_for_its_casts():
    """Of its input, and in backward of its gradient; with current scales each is read once more, for its largest."""
    layout = {"gpus": 8, "batch": 8, "parallel": {"tensor": 1}, "policy": "none"}
    job = catalogued_job("gpt-6.7b", "h800-80g", fp8="delayed", **layout)
    delayed, current = analytic_profile(job), analytic_profile(catalogued_job("gpt-6.7b", "h800-80g", fp8="tensorwise", **layout))
    hbm, gemm_s = job.cluster.hbm, 2 * 2048 * 4096 * 16384 / (job.cluster.matmul.efficiency * 1979e12)
    start_s, taken, made = hbm.latency_us * 1e-6, 2048 * 16384, 2048 * 4096
    fc2 = delayed.mlp.items["linear_fc2"]
    assert fc2.forward_s == pytest.approx(gemm_s + 2 * start_s + (2 + 1 + 1) * taken / hbm.byte_per_s)
    assert fc2.backward_s - fc2.dgrad_s - fc2.wgrad_s == pytest.approx(start_s + (2 + 1 + 1) * made / hbm.byte_per_s)
    searched_s = current.mlp.items["linear_fc2"].forward_s - fc2.forward_s
    assert searched_s == pytest.approx(start_s + 2 * taken / hbm.byte_per_s)
    assert delayed.attention.items["core_attention"].forward_s == current.attention.items["core_attention"].forward_s


def test_plans_are_made_with_scales_by_tensor_and_by_block():
    job = catalogued_job(
        "llama-7b",
        "h800-80g",
        gpus=8,
        batch=16,
        parallel={"tensor": 2, "distributed_optimizer": True},
        policy="planned",
        fp8="tensorwise",
    )
    assert make_plan(job, analytic_profile(job)).model.fp8 == "tensorwise"
    block = job.model_copy(update={"model": job.model.model_copy(update={"fp8": Fp8(recipe="blockwise")})})
    assert make_plan(block, analytic_profile(block)).model.fp8 == "blockwise"


def test_what_is_gathered_in_fp8_is_half_of_it():
    job = catalogued_job("llama-65b", "h800-80g", fp8="delayed")
    profile, size = analytic_profile(job), LayerShape.of(job).gathered_bytes
    half_s, whole_s = profile.link_s("all_gather", size // 2), profile.link_s("all_gather", size)
    assert window_lengths_s(profile, "fwd", MLP, size) == (half_s, profile.link_s("reduce_scatter", size))
    assert window_lengths_s(profile, "bwd", MLP, size)[0] == half_s < whole_s
    blockwise = analytic_profile(catalogued_job("llama-65b", "h800-80g", fp8="blockwise"))
    assert window_lengths_s(blockwise, "bwd", MLP, size)[0] == whole_s, "bytes by rows and by columns"


def test_bytes_and_flops_are_those_of_the_shape():
    job = gpt_22b(sequence_parallel=True)
    profile, shape = analytic_profile(job), LayerShape.of(job)
    for half in ("attention", "mlp"):
        assert profile.half(half).tensors == half_tensors(shape, half)
        assert {name: item.flops for name, item in profile.half(half).items.items()}.items() <= flops_of(shape).items()


def test_unfused_attention_on_a_gpu_saves_what_was_published():
    """5as/h of sbh on each of t ranks."""
    shape = LayerShape.of(gpt_22b())
    scores = [tensor.bytes for tensor in half_tensors(shape, "attention") if tensor.bytes >= shape.scores]
    assert sum(scores) == 5 * 64 * 2048**2 * 4 // 8


def test_sequence_parallelism_shortens_norms_and_dropouts_and_keeps_the_messages_size():
    whole, sliced = (analytic_profile(gpt_22b(**layout)) for layout in ({}, {"sequence_parallel": True}))
    for half in ("attention", "mlp"):
        assert sliced.half(half).forward_s < whole.half(half).forward_s
    size = LayerShape.of(gpt_22b()).gathered_bytes
    two = sliced.link_s("all_gather", size) + sliced.link_s("reduce_scatter", size)
    assert two == pytest.approx(whole.link_s("all_reduce", size), rel=0.05)


def test_tensor_parallelism_over_pcie_and_across_nodes_is_slower():
    size = LayerShape.of(gpt_22b()).gathered_bytes
    nvlink, pcie = (
        analytic_profile(catalogued_job("gpt-22b", name, gpus=8, batch=4, parallel={"tensor": 8})).link_s("all_reduce", size)
        for name in ("a100-80g", "a100-80g-pcie")
    )
    assert pcie > 5 * nvlink
    wide = catalogued_job("gpt-22b", "a100-80g", gpus=16, batch=4, parallel={"tensor": 16})
    assert analytic_profile(wide).link_s("all_reduce", size) > 5 * nvlink


def test_context_ranks_wait_for_keys_and_values_where_they_arrive_later_than_the_own_are_done():
    """Two ranks, two turns: in one of them the other's 2 x 2 bytes x b s/2 x h/t come in. Nothing else is exposed."""

    def attention(seq, cluster, context=2):
        layout = {"tensor": 4, "context": context, "sequence_parallel": True}
        job = catalogued_job("llama-65b", cluster, gpus=8, batch=4, seq=seq, parallel=layout, policy="none")
        return analytic_profile(job).attention.items["core_attention"].forward_s, job

    (short_s, job), (alone_s, _) = attention(2048, "h800-80g"), attention(2048, "h800-80g", context=1)
    arrives_s = job.cluster.nvlink.seconds(2 * 2 * 1024 * 8192 // 4)
    assert short_s == pytest.approx(alone_s / 4 + arrives_s, rel=0.02)
    long_s, whole_s = (attention(65536, "h800-80g", context=context)[0] for context in (2, 1))
    assert long_s == pytest.approx(whole_s / 2, rel=0.01)


def test_what_attention_does_not_hide_of_an_exchange_is_exposed():
    """Four ranks, 65536 tokens: gathered keys and values are waited for once forward, twice backward; traded heads in four
    messages of three quarters each way; groups of two trade halves, and pass on what attention hides."""

    def attention(exchange, levels=None):
        layout = {"tensor": 2, "context": 4, "sequence_parallel": True, "context_exchange": exchange, "context_levels": levels}
        job = catalogued_job("llama-65b", "h800-80g", gpus=8, seq=65536, parallel=layout, policy="none")
        return analytic_profile(job).attention.items["core_attention"], job

    (ring, job), (gathered, _), (traded, _) = attention("p2p"), attention("all_gather"), attention("a2a")
    both, _ = attention("a2a+p2p", (2, 2))
    own = 2 * 65536 // 4 * 8192 // 2  # bytes of a rank's keys, and of its queries
    assert ring.forward_s < gathered.forward_s
    nvlink = job.cluster.nvlink.seconds
    assert gathered.forward_s - ring.forward_s == pytest.approx(2 * nvlink(3 * own))
    assert gathered.backward_s - ring.backward_s == pytest.approx(4 * nvlink(3 * own))
    assert traded.forward_s - ring.forward_s == pytest.approx(4 * nvlink(0.75 * own)) == traded.backward_s - ring.backward_s
    assert both.forward_s - ring.forward_s == pytest.approx(4 * nvlink(0.5 * own))


def test_what_an_exchange_leaves_behind():
    """Of queries, keys and values, which are as wide here: their rows on a rank are 4096."""

    def made_by(exchange):
        layout = {"tensor": 8, "context": 2, "sequence_parallel": True, "context_exchange": exchange}
        job = catalogued_job("llama-65b", "h800-80g", gpus=16, seq=8192, parallel=layout, policy="none")
        tensors = half_tensors(LayerShape.of(job), "attention")
        whole = 2 * 4096 * 8192 // 8
        saved = [tensor for tensor in tensors if "core_attention" in tensor.saved_by and tensor.bytes == whole]
        return [tensor.made_by for tensor in saved]

    assert made_by("p2p") == ["rotary", "core_attention", "core_attention"]
    assert made_by("all_gather") == ["rotary"] * 3
    assert made_by("a2a") == ["core_attention"] * 4


def test_a_planner_takes_it_for_a_measured_one():
    job = catalogued_job("gpt-22b", "a100-80g", gpus=16, batch=16, parallel={"tensor": 8, "pipeline": 2}, policy="planned")
    plan = make_plan(job, analytic_profile(job))
    assert plan.stages[0].predicted.step_s > 0


def test_a_cluster_without_figures_is_refused_with_all_that_is_missing():
    with pytest.raises(ConfigError) as refusal:
        analytic_profile(tiny_job())
    parts = [problem.where for problem in refusal.value.problems]
    assert parts == [f"cluster testbed: {part}" for part in ("matmul", "hbm", "pcie", "nic", "node")]


def test_unfused_attention_is_a_small_gemm_for_each_head():
    """It was one large GEMM of all heads, and so nearly as efficient as a linear."""
    job = gpt_22b()
    shape, matmul, hbm = LayerShape.of(job), job.cluster.matmul, job.cluster.hbm
    one_s = matmul.gemm_s(2 * 2048 * 2048 * 96, "bf16")
    heads, moved = 4 * 64 // 8, 2 * (shape.scores + shape.tokens * (shape.query_width + shape.key_width))
    gemm_s = max(heads * one_s, moved / hbm.byte_per_s) + hbm.latency_us * 1e-6
    softmax_s = hbm.latency_us * 1e-6 + 2 * 2 * shape.scores / hbm.byte_per_s
    kept = job.model_copy(update={"model": job.model.model_copy(update={"attention_dropout": 0.0})})
    core = analytic_profile(kept).attention.items["core_attention"]
    assert core.forward_s == pytest.approx(2 * gemm_s + softmax_s)
    assert heads * one_s > 1.5 * matmul.gemm_s(2 * heads * 2048 * 2048 * 96, "bf16")


def test_flash_attention_2_is_slower_where_transformer_engine_takes_another_kernel():
    cores = {}
    for cluster in ("h100-80g", "h800-80g"):
        job = catalogued_job("llama-7b", cluster, gpus=8, batch=8, parallel={"tensor": 1})
        asked = job.model_copy(update={"model": job.model.model_copy(update={"attention_kernel": "flash_attention_2"})})
        cores[cluster] = [analytic_profile(each).attention.items["core_attention"].forward_s for each in (job, asked)]
    assert cores["h100-80g"][1] == pytest.approx(0.52 / 0.32 * cores["h100-80g"][0], rel=0.01)
    assert cores["h800-80g"][1] == cores["h800-80g"][0], "its description knows one figure"


def test_a_linear_in_fp8_reaches_the_share_that_was_measured_in_fp8():
    job = catalogued_job("llama-7b", "h100-80g", fp8="delayed", gpus=8, batch=8, parallel={"tensor": 1})
    units = job.cluster.fp8.model_copy(update={"efficiency": None})
    alike = job.model_copy(update={"cluster": job.cluster.model_copy(update={"fp8": units})})
    measured_s, taken_s = (analytic_profile(each).mlp.items["linear_fc1"].dgrad_s for each in (job, alike))
    assert measured_s == pytest.approx(0.8 / 0.71 * taken_s, rel=0.01)


def test_a_reduction_that_no_gemm_hides_is_a_window_of_its_whole_length():
    """Megatron of 2021 reduced a linear's gradient after both GEMMs; it slows none of them then."""
    job, size = gpt_22b(), LayerShape.of(gpt_22b()).gathered_bytes
    exposing = job.model_copy(update={"overlap": Overlap(linears=False)})
    stock, exposed = analytic_profile(job), analytic_profile(exposing)
    assert window_lengths_s(stock, "bwd", MLP, size) == (0.0,)
    assert window_lengths_s(exposed, "bwd", MLP, size) == (exposed.link_s("all_reduce", size),)
    assert exposed.mlp.items["linear_fc1"].wgrad_s < stock.mlp.items["linear_fc1"].wgrad_s
    sliced = gpt_22b(sequence_parallel=True).model_copy(update={"overlap": Overlap(linears=False)})
    assert analytic_profile(sliced) == analytic_profile(gpt_22b(sequence_parallel=True))


def test_scattered_messages_are_parts_that_are_gathered_behind_the_message():
    layout = {"tensor": 8, "pipeline": 4}
    whole, parts = (catalogued_job("gpt-175b", "a100-80g", parallel=layout | more) for more in ({}, {"scattered_messages": True}))
    size = LayerShape.of(whole).input_bytes
    profile = analytic_profile(parts)
    nic = parts.cluster.nic
    assert profile.link_s("p2p", size) == pytest.approx(nic.seconds(size / 8) + profile.link_s("all_gather", size))
    assert analytic_profile(whole).link_s("p2p", size) == pytest.approx(nic.seconds(size))


def test_heads_of_another_width_change_the_attention_alone():
    """Twice as wide: twice the columns of queries, keys and values, and twice the FLOPs of the attention."""
    job = catalogued_job("llama3-8b", "h100-80g", gpus=8, batch=8, parallel={"tensor": 2})
    wide = job.model_copy(update={"model": job.model.model_copy(update={"kv_channels": 256})})
    narrow, flops = (flops_of(LayerShape.of(each)) for each in (job, wide))
    ratios = {name: flops[name] / narrow[name] for name in narrow if narrow[name]}
    assert ratios == {"linear_qkv": 2, "core_attention": 2, "linear_proj": 2, "linear_fc1": 1, "linear_fc2": 1}
    attention = 4096 * 128 * (2 * 32 + 2 * 8)
    assert passed_weights(wide.model) - passed_weights(job.model) == attention
    assert shape_of(job).kv_channels is None
    assert shape_of(wide).kv_channels == 256


def test_a_fused_loss_reads_and_writes_less():
    job = catalogued_job("llama3-8b", "h100-80g", gpus=8, batch=8, parallel={"tensor": 1})
    heads = {
        kind: analytic_profile(job.model_copy(update={"model": job.model.model_copy(update={"cross_entropy": kind})})).head
        for kind in ("unfused", "native", "te")
    }
    logits, rate = 8192 * 128256, job.cluster.hbm.byte_per_s
    assert heads["unfused"].forward_s - heads["native"].forward_s == pytest.approx(16 * logits / rate)
    assert heads["native"].backward_s - heads["te"].backward_s == pytest.approx(2 * logits / rate)


def deterministic(job):
    return job.model_copy(update={"model": job.model.model_copy(update={"deterministic": True})})


def test_flash_attention_adds_up_in_one_order_in_a_copy_for_every_block():
    """16 heads of one sequence on 108 multiprocessors: 7 copies of the queries' gradient, one of which there is anyway."""
    job = catalogued_job("llama-7b", "a100-80g", gpus=8, batch=8, parallel={"tensor": 2, "sequence_parallel": True})
    shape, more = LayerShape.of(job), 6 * 4 * 4096 * 2048
    cores = [analytic_profile(each).attention.items["core_attention"] for each in (job, deterministic(job))]
    cleared_and_read_s = job.cluster.hbm.latency_us * 1e-6 + 2 * more / job.cluster.hbm.byte_per_s
    assert cores[1].backward_s - cores[0].backward_s == pytest.approx(cleared_and_read_s)
    assert cores[1].forward_s == cores[0].forward_s
    assert ordered_bytes(LayerShape.of(deterministic(job))) == more
    assert ordered_bytes(shape) == 0
    many = deterministic(catalogued_job("llama-7b", "a100-80g", gpus=8, batch=32, micro=4, parallel={"tensor": 1}))
    assert ordered_bytes(LayerShape.of(many)) == 0, "as many heads as blocks"


def test_cudnn_adds_up_in_one_order_from_products_that_it_writes_down():
    job = catalogued_job("llama-7b", "h100-80g", gpus=8, batch=8, parallel={"tensor": 2, "sequence_parallel": True})
    cores = [analytic_profile(each).attention.items["core_attention"].backward_s for each in (job, deterministic(job))]
    assert cores[1] == pytest.approx(cores[0] / 0.82)
    assert layer_in_hand_bytes(LayerShape.of(deterministic(job))) - layer_in_hand_bytes(LayerShape.of(job)) > 0
    assert ordered_bytes(LayerShape.of(deterministic(job))) == 2 * 16 * 4096**2
    around_a_ring = catalogued_job("llama-7b", "h100-80g", gpus=8, batch=8, parallel={"tensor": 2, "context": 2})
    assert ordered_bytes(LayerShape.of(deterministic(around_a_ring))) == 2 * 16 * 2048**2, "one turn's"
    flash = job.model.model_copy(update={"attention_kernel": "flash_attention_2", "deterministic": True})
    assert ordered_bytes(LayerShape.of(job.model_copy(update={"model": flash}))) == 8 * 4 * 4096 * 2048, "9 copies on 132"
    blackwell = catalogued_job("llama-7b", "b200-180g", gpus=8, batch=8, parallel={"tensor": 2})
    assert analytic_profile(deterministic(blackwell)) == analytic_profile(blackwell)


def test_attention_of_packed_sequences_goes_with_the_squares_of_their_lengths():
    """Sixteen equal sequences of a sixteenth have a sixteenth of the pairs; unequal ones with the same mean have more. All
    else of a layer goes by its tokens."""
    job = catalogued_job("llama-65b", "h800-80g", gpus=8, parallel={"tensor": 8})
    seq = job.model.seq

    def pairs(**lengths: float) -> float:
        batch = job.batch.model_copy(update={"lengths": Lengths(**lengths)})
        return LayerShape.of(job.model_copy(update={"batch": batch})).seen

    assert LayerShape.of(job).seen == pairs(mean=seq) == 1
    assert pairs(mean=seq / 16) == pytest.approx((seq / 16 + 1) / (seq + 1))
    assert pairs(mean=seq / 16, mean_square=4 * (seq / 16) ** 2) == pytest.approx((seq / 4 + 1) / (seq + 1))
    packed = job.model_copy(update={"batch": job.batch.model_copy(update={"lengths": Lengths(mean=seq / 16)})})
    whole, short = (analytic_profile(each).model_dump() for each in (job, packed))
    assert whole.pop("attention")["items"].keys() == short["attention"]["items"].keys()
    one, other = (analytic_profile(each).attention.items for each in (job, packed))
    assert [item for item in one if one[item] != other[item]] == ["core_attention"]
    assert other["core_attention"].forward_s < one["core_attention"].forward_s
    short.pop("attention")
    assert whole == short
