"""What experts save and how long they take, by hand for Mixtral."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron_lynx.anatomy import PASSES
from megatron_lynx.config import Experts, Job
from megatron_lynx.cost.communication import window_lengths_s
from megatron_lynx.fp8_recipes import STORED
from megatron_lynx.kinds.experts.planning import all_to_all_s, expected_parts, routed_rows
from megatron_lynx.kinds.experts.section import DISPATCHERS, SHARED_EXPERTS, Dispatcher
from megatron_lynx.launch_arguments import job_of, read_launch
from megatron_lynx.planner import decide
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.shape import FP32_BYTES, LayerShape
from megatron_lynx.simulator.halves import segments
from megatron_lynx.stock.price import priced
from megatron_lynx.stock.setting import FULL, NONE, StockSetting
from megatron_lynx.testbed.ranks import RankPool
from tests.config.jobs import catalogued_job
from tests.profiler.made_up import saved_parts
from tests.profiler.on_ranks import bytes_saved_by_items
from tests.stock.parts import memory_of_stages
from tests.te_releases import pool_with
from tests.tiny_jobs import tiny_job


def mixtral(cluster: str = "h800-80g", **layout: object) -> Job:
    parallel = {"tensor": 1, "pipeline": 4, "expert": 8, "distributed_optimizer": True, **layout}
    return catalogued_job("mixtral-8x7b", cluster, gpus=64, parallel=parallel, policy="none")


def with_load(job: Job, load: float) -> Job:
    experts = job.model.experts.model_copy(update={"load": load})
    return job.model_copy(update={"model": job.model.model_copy(update={"experts": experts})})


def test_what_experts_of_a_fused_layer_save() -> None:
    """4096 tokens, each to 2 of 8 experts. SwiGLU fused with the probabilities: its input 2f, and its output f."""
    tokens, hidden, ffn, rows = 4096, 4096, 14336, 2 * 4096
    shape = LayerShape.of(mixtral())
    assert routed_rows(shape) == rows
    assert saved_parts(shape) == {
        "input": 2 * tokens * hidden,
        "pre_mlp_layernorm": 2 * tokens,
        "router": 2 * tokens * hidden + tokens * (2 * (2 * 8 + 4) + 8 * 4),
        "dispatch": tokens * (2 * 8 + 8 * (1 + 2)),
        "experts_fc1": 2 * rows * hidden,
        "experts_activation": 2 * rows * (2 * ffn + 1),
        "experts_fc2": 2 * rows * ffn,
        "combine": 0,
        "mlp_bda": 0,
    }


def test_tensor_ranks_hand_out_their_own_tokens_and_cut_experts_work_on_all_of_them() -> None:
    whole, cut = (LayerShape.of(mixtral(tensor=2, sequence_parallel=True, expert_tensor=size, expert=4)) for size in (1, 2))
    assert routed_rows(whole) == 4096
    assert routed_rows(cut) == 2 * routed_rows(whole)
    parts = saved_parts(cut)
    assert parts["experts_fc1"] == 2 * 8192 * 4096
    assert parts["experts_activation"] + parts["experts_fc2"] == 2 * 8192 * (3 * 14336 // 2 + 1)


def test_shared_experts_are_an_mlp_of_their_width() -> None:
    job = mixtral()
    model = job.model.model_copy(update={"experts": job.model.experts.model_copy(update={"shared_ffn": 1024})})
    parts = saved_parts(LayerShape.of(job.model_copy(update={"model": model})))
    assert parts["shared_fc1"] == 2 * 4096 * 4096, "the norm's output"
    assert parts["router"] == saved_parts(LayerShape.of(job))["router"] - 2 * 4096 * 4096
    assert parts["shared_activation"] + parts["shared_fc2"] == 2 * 4096 * 3 * 1024


def test_what_experts_save_and_how_long_they_take_grows_with_the_load() -> None:
    """Of one rank of eight, which gets half as many rows again; what its own tokens leave behind stays as it is."""
    job = mixtral()
    loaded = with_load(job, 1.5)
    balanced, more = (saved_parts(LayerShape.of(each)) for each in (job, loaded))
    rows = ("experts_fc1", "experts_activation", "experts_fc2")
    assert {name: 1.5 * balanced[name] if name in rows else balanced[name] for name in balanced} == more
    halves = [analytic_profile(each).experts for each in (job, loaded)]
    assert halves[1].items["experts_fc1"].forward_s == pytest.approx(1.5 * halves[0].items["experts_fc1"].forward_s, rel=0.01)
    assert halves[1].exchange_s == pytest.approx(1.5 * halves[0].exchange_s, rel=0.1)
    assert halves[1].items["router"] == halves[0].items["router"]
    assert (job.digest, analytic_profile(job).digest) != (loaded.digest, analytic_profile(loaded).digest)


def test_a_load_is_at_most_that_of_every_token_on_one_rank() -> None:
    """8 ranks, an expert each: of a token's two experts one may be there."""
    Job.model_validate(with_load(mixtral(), 4.0).model_dump(by_alias=True))
    with pytest.raises(ValidationError, match=r"model.experts.load .4.5. must be at most 4 with parallel.expert 8"):
        Job.model_validate(with_load(mixtral(), 4.5).model_dump(by_alias=True))


def test_an_exchange_goes_over_nvlink_within_a_node_and_over_nics_between_nodes() -> None:
    cluster, size = mixtral().cluster, 1e9
    assert cluster.nvlink is not None
    assert cluster.nic is not None
    assert all_to_all_s(cluster, 64, 1, 1, size) == 0
    assert all_to_all_s(cluster, 64, 8, 1, size) == cluster.nvlink.seconds(size * 7 / 8)
    shared = cluster.node.gpus / cluster.nic.per_node
    assert all_to_all_s(cluster, 64, 16, 1, size) == pytest.approx(cluster.nic.seconds(shared * size / 2))
    assert all_to_all_s(cluster, 64, 8, 2, size) == pytest.approx(cluster.nic.seconds(shared * size / 2))


@pytest.mark.parametrize(
    ("gpus", "ranks", "stride", "inside"),
    [(6, 6, 1, 6), (12, 6, 1, 2), (48, 6, 1, 2), (12, 12, 1, 4), (24, 12, 1, 4), (24, 6, 2, 2), (24, 3, 1, 1), (32, 2, 16, 1)],
)
def test_an_exchange_waits_for_the_rank_with_fewest_near(gpus: int, ranks: int, stride: int, inside: int) -> None:
    """It was priced as the best rank has it: 6 ranks on nodes of 8 as if no group were on two of them."""
    cluster, size = mixtral().cluster, 1e9
    near_s, far_s = cluster.nvlink.seconds(size * (inside - 1) / ranks), 0.0
    if inside < ranks:
        far_s = cluster.nic.seconds(size * (ranks - inside) / ranks * cluster.node.gpus / cluster.nic.per_node)
    assert all_to_all_s(cluster, gpus, ranks, stride, size) == pytest.approx(max(near_s, far_s))


def test_experts_take_the_time_of_their_gemms_and_exchanges() -> None:
    job = mixtral()
    half = analytic_profile(job).experts
    assert half is not None
    flops = 3 * 2 * 8192 * 4096 * 14336
    gemms_s = flops / (job.cluster.matmul.efficiency * job.cluster.matmul.peak_flop_per_s("bf16"))
    assert gemms_s < half.forward_s - 1e-6 * job.cluster.host_time.counts_us < 1.3 * gemms_s
    assert 4 * job.cluster.nvlink.seconds(2 * 8192 * 4096 * 7 / 8) == pytest.approx(sum(map(half.waits_s, PASSES)))


def test_a_pass_of_experts_waits_once_for_the_counts_that_the_host_reads() -> None:
    """A step of Qwen3 30B, 3,072 micro-batches of layers, was 1.9 s too short: time that is no kernel's."""
    job = mixtral()
    host_time = job.cluster.host_time.model_copy(update={"counts_us": 0.0})
    without = job.model_copy(update={"cluster": job.cluster.model_copy(update={"host_time": host_time})})
    waiting, half = (analytic_profile(one).experts for one in (job, without))
    counts_s = 1e-6 * job.cluster.host_time.counts_us
    assert counts_s > 0
    assert waiting.forward_s - half.forward_s == pytest.approx(counts_s)
    assert waiting.backward_s - half.backward_s == pytest.approx(counts_s)
    assert sum(map(waiting.waits_s, PASSES)) == sum(map(half.waits_s, PASSES))


@pytest.mark.parametrize(("given", "waits"), [("", True), ("--moe-pad-expert-input-to-capacity", False)])
def test_experts_padded_to_their_capacity_wait_for_no_counts(given: str, waits: bool) -> None:
    """NeMo's token drop was priced with a wait in each pass, though the host knows how many rows each expert gets."""
    words = "--num-experts 8 --moe-grouped-gemm --moe-router-load-balancing-type aux_loss --moe-token-dispatcher-type alltoall"
    launch = f"pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 8 --seq-length 1024 {words}"
    sizes = "--max-position-embeddings 1024 --micro-batch-size 1 --vocab-size 32000 --moe-expert-capacity-factor 1.0"
    job = job_of(read_launch(f"{launch} {sizes} {given}".split(), gpus=8, planning=False), "h100-80g")
    router = analytic_profile(job).experts.items["router"]
    counts_s = 1e-6 * job.cluster.host_time.counts_us
    assert (router.forward_s > counts_s) == waits


def test_a_buffer_of_gradients_is_read_and_written_after_the_products_of_an_expert() -> None:
    """An expert of few rows took as long with 16-bit as with fp32 gradients, and nothing for adding them."""
    layout = {"tensor": 1, "pipeline": 1, "layers_per_chunk": None, "sequence_parallel": False, "expert": 8}
    jobs = [
        catalogued_job("qwen3-30b-a3b", "h100-80g", gpus=8, parallel=layout, optimizer={"gradients": kind})
        for kind in ("fp32", "bf16")
    ]
    exact, half = (analytic_profile(job).experts.items["experts_fc1"] for job in jobs)
    weights, hbm = 16 * 2048 * 2 * 768, jobs[0].cluster.hbm
    assert exact.wgrad_s - half.wgrad_s == pytest.approx(2 * (4 - 2) * weights / hbm.byte_per_s)
    assert exact.wgrad_s - exact.dgrad_s == pytest.approx(2 * 4 * weights / hbm.byte_per_s, rel=0.01)


def test_each_expert_casts_its_rows_to_fp8_by_kernels_of_its_own() -> None:
    """All experts of a rank were cast by one kernel."""
    layout = {"tensor": 1, "pipeline": 1, "layers_per_chunk": None, "sequence_parallel": False}
    jobs = [
        catalogued_job("qwen3-30b-a3b", "h100-80g", gpus=16, fp8="tensorwise", parallel={**layout, "expert": expert})
        for expert in (16, 8)
    ]
    fc2 = [analytic_profile(job).experts.items["experts_fc2"] for job in jobs]
    casts_s = [item.backward_s - item.dgrad_s - item.wgrad_s for item in fc2]
    more_kernels = 8 * (STORED["tensorwise"].searched + 1)
    assert casts_s[1] - casts_s[0] == pytest.approx(more_kernels * 1e-6 * jobs[0].cluster.hbm.latency_us, rel=0.01)


def test_few_rows_for_each_of_many_experts_take_longer_than_as_many_for_one() -> None:
    """Where small GEMMs are slow, as on an A100."""
    few, many = (analytic_profile(mixtral("a100-80g", expert=ranks)).experts for ranks in (1, 8))
    assert few is not None
    assert many is not None
    assert sum(map(few.waits_s, PASSES)) == 0
    assert few.forward_s > 1.01 * (many.forward_s - sum(map(many.waits_s, PASSES)) / 2)


def test_a_half_is_the_sum_of_its_items_and_of_two_exchanges_a_pass() -> None:
    half = analytic_profile(mixtral()).experts
    assert half.forward_s == pytest.approx(sum(item.forward_s for item in half.items.values()) + 2 * half.exchange_s)
    assert half.items["experts_fc1"].flops == 2 * half.items["experts_fc2"].flops == 2 * 8192 * 4096 * 2 * 14336


EIGHT = Experts(count=8, per_token=2, ffn=96)
GATHERED = EIGHT.model_copy(update={"dispatcher": "allgather"})


@pytest.mark.parametrize(
    "job",
    [
        tiny_job("llama", seq=64, hidden=64, experts=EIGHT),
        tiny_job("gpt", seq=64, hidden=64, bias=False, experts=EIGHT),
        tiny_job("llama", seq=64, hidden=64, expert=2, replicas=2, experts=Experts(count=8, per_token=3, ffn=96, shared_ffn=48)),
        tiny_job("llama", seq=64, hidden=64, tensor=2, sequence_parallel=True, experts=EIGHT),
        tiny_job("llama", seq=64, hidden=64, expert=2, replicas=2, experts=GATHERED),
        tiny_job("llama", seq=64, hidden=64, tensor=2, sequence_parallel=True, experts=GATHERED),
    ],
    ids=["one rank", "GELU and dropout", "shared out, with shared ones", "cut", "shared out, gathered", "cut, gathered"],
)
def test_every_item_of_megatrons_own_layers_saves_what_its_shape_says(pool_of: Callable[[int], RankPool], job: Job) -> None:
    """`SequentialMLP` behind the all-to-all and the all-gather dispatcher, eager. Over all ranks together no load is out of
    balance."""
    ranks = pool_of(job.gpus).run(bytes_saved_by_items, job)
    saved = {item: sum(each.get(item, 0) for each in ranks) for item in ("input", *job.model.experts.section.names)}
    parts = {item: job.gpus * size for item, size in saved_parts(LayerShape.of(job)).items()}
    counted_bytes = job.gpus * (2 * EIGHT.count + 1) * FP32_BYTES  # of each expert, for the auxiliary loss: not priced
    assert 0 <= saved.pop("router") - parts.pop("router") <= counted_bytes
    assert saved == parts


ROUTERS = {
    "": {},
    "--moe-aux-loss-coeff 0.01": {"moe_aux_loss_coeff": 0.01},
    "--moe-router-load-balancing-type none --moe-z-loss-coeff 0.001": {
        "moe_router_load_balancing_type": "none",
        "moe_z_loss_coeff": 0.001,
    },
    "--moe-aux-loss-coeff 0.01 --moe-router-pre-softmax": {"moe_aux_loss_coeff": 0.01, "moe_router_pre_softmax": True},
    "--moe-aux-loss-coeff 0.01 --moe-router-score-function sigmoid --moe-router-num-groups 4 --moe-router-group-topk 2": {
        "moe_aux_loss_coeff": 0.01,
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
    },
}


@pytest.mark.parametrize("flags", ROUTERS)
def test_a_router_saves_what_its_flags_say(pool_of: Callable[[int], RankPool], flags: str) -> None:
    """Sigmoid scores, group-limited routing and a z-loss were said not to matter: DeepSeek-V3's router saves 2.4 times the bytes
    of scores that were counted. Beside those: an index for each choice, and sums of rows."""
    words = f"--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-experts 64 --moe-router-topk 6 {flags}"
    read = read_launch(words.split(), gpus=1).job_data["model"]["experts"]
    job = tiny_job("llama", seq=64, hidden=64, experts=Experts(count=64, per_token=6, ffn=32, scores=read.get("scores", 1.0)))
    fields = {"moe_aux_loss_coeff": 0.0, **ROUTERS[flags]}
    [saved] = pool_of(1).run(partial(bytes_saved_by_items, **fields), job)
    shape = LayerShape.of(job)
    choices, sums = shape.tokens * 6 * 8, (2 * 64 + 1 + 3 * shape.tokens) * FP32_BYTES
    assert -choices <= saved["router"] - saved_parts(shape)["router"] <= sums


@pytest.mark.parametrize("weighted", [False, True])
def test_one_kernel_of_squared_relu_and_probabilities_saves_a_block_less(weighted: bool) -> None:
    """Of Nemotron 3 Nano `moe_act` was said to free twice what it does: `--use-fused-weighted-squared-relu` was said not to
    matter."""
    experts = Experts(count=8, per_token=2, ffn=96, weighted_relu=weighted)
    fields = {"implementation": "transformer_engine", "activation": "squared_relu", "dtype": "bf16", "experts": experts}
    job = tiny_job("llama", seq=64, hidden=64, **fields)
    config = {"moe_grouped_gemm": True, "use_fused_weighted_squared_relu": weighted, "bias_activation_fusion": False}
    with pool_with("2.9", 1) as pool:
        [saved] = pool.run(partial(bytes_saved_by_items, **config), job)
    parts = saved_parts(LayerShape.of(job))
    items = ("experts_fc1", "experts_activation", "experts_fc2")
    assert {item: saved[item] for item in items} == {item: parts[item] for item in items}
    rows_bytes = 2 * routed_rows(LayerShape.of(job)) * 96
    assert parts["experts_activation"] // rows_bytes == 2 - weighted


def beside(job: Job, shared_ffn: int, *, shared_beside: bool = True) -> Job:
    """With shared experts of that width, beside the exchanges or before them; in both cases kept whole."""
    experts = {"shared_ffn": shared_ffn, "whole": True, "shared_beside": shared_beside}
    model = job.model.model_copy(update={"experts": job.model.experts.model_copy(update=experts)})
    return job.model_copy(update={"model": model})


def test_shared_experts_beside_the_exchanges_keep_their_gathered_input(pool_of: Callable[[int], RankPool]) -> None:
    """Megatron gathers it outside of their first linear then, which saves what it is given. It was priced as without."""
    layout = {"tensor": 2, "sequence_parallel": True, "expert": 2, "expert_tensor": 1}
    job = beside(tiny_job("llama", seq=64, hidden=64, **layout, experts=EIGHT), 48)
    ranks = pool_of(2).run(bytes_saved_by_items, job)
    saved, priced = sum(sum(each.values()) for each in ranks), 2 * sum(saved_parts(LayerShape.of(job)).values())
    assert 0 <= saved - priced <= 2 * (2 * EIGHT.count + 1) * FP32_BYTES


@pytest.mark.parametrize("ffn", [64, 14336])
@pytest.mark.parametrize("dispatcher", [each for each in DISPATCHERS if each != "allgather"])
def test_shared_experts_hide_exchanges_and_no_second_twice(dispatcher: Dispatcher, ffn: int) -> None:
    """What passes take less than with shared experts before the exchanges: of each exchange what computes beside it, at most
    all of it. Windows are what is left, and passes are as long in the simulator."""
    plain = mixtral()
    experts = plain.model.experts.model_copy(update={"dispatcher": dispatcher})
    plain = plain.model_copy(update={"model": plain.model.model_copy(update={"experts": experts})})
    jobs = [beside(plain, ffn, shared_beside=on) for on in (False, True)]
    before, after = map(analytic_profile, jobs)
    section, message_bytes = jobs[1].model.experts.section, LayerShape.of(plain).gathered_bytes
    most_s = plain.fused_dispatch.computing_kept * before.experts.exchange_s
    for passing, name in (("fwd", "forward_s"), ("bwd", "backward_s")):
        fc1_s, activation_s, fc2_s = (getattr(before.experts.items[item], name) for item in SHARED_EXPERTS)
        hidden_s = min(most_s, fc1_s + activation_s) + min(most_s, fc2_s)
        assert hidden_s > 0
        assert getattr(before.experts, name) - getattr(after.experts, name) == pytest.approx(hidden_s)
        windows_s = [window_lengths_s(each, passing, section, message_bytes) for each in (before, after)]
        assert sum(windows_s[0]) - sum(windows_s[1]) == pytest.approx(hidden_s if section.exchanges_in_windows else 0)
        assert all(each >= 0 for each in windows_s[1])
        parts = segments(after, passing, section)
        assert sum(parts.compute_s) + sum(parts.windows_s) == pytest.approx(getattr(after.experts, name))


def test_a_step_is_shorter_with_shared_experts_beside_the_exchanges() -> None:
    """Stock's and a plan's, by at most what is hidden; and where `moe` runs again, what runs again is shorter, too."""
    jobs = [beside(mixtral(), 4096, shared_beside=on) for on in (False, True)]
    before, after = ((job, analytic_profile(job)) for job in jobs)
    most_s = 3 * 2 * before[1].experts.exchange_s * before[0].model.layers * before[0].microbatches
    for setting in (NONE, StockSetting(("moe",)), FULL):
        steps = [priced(job, costs, setting).step_s for job, costs in (before, after)]
        assert 0 < steps[0] - steps[1] <= most_s
    planned = [decide(job.model_copy(update={"policy": "planned"}), costs).simulation.step_s for job, costs in (before, after)]
    assert 0 < planned[0] - planned[1] <= most_s


def with_hold(job: Job, load: float) -> Job:
    experts = job.model.experts.model_copy(update={"holds": load})
    return job.model_copy(update={"model": job.model.model_copy(update={"experts": experts})})


ROWS = ("experts_fc1", "experts_activation", "experts_fc2")


@settings(max_examples=8, deadline=None)
@given(favour=st.floats(0.0, 4.0), capacity=st.sampled_from([None, 0.75, 1.25, 1.75]))
def test_bytes_hold_up_to_the_load_that_is_said(
    pool_of: Callable[[int], RankPool], favour: float, capacity: float | None
) -> None:
    """Whatever the router does: rows of the fullest rank are those of its load, to the byte. Where tokens beyond a capacity are
    dropped, bytes hold for that load, and a router that favours one rank reaches it."""
    job = tiny_job("llama", seq=64, hidden=64, expert=2, replicas=2, experts=Experts(count=8, per_token=3, ffn=96))
    ranks = pool_of(2).run(bytes_saved_by_items, job, favour, capacity)
    balanced = saved_parts(LayerShape.of(job))
    load = max(each["experts_fc1"] for each in ranks) / balanced["experts_fc1"]
    bound = saved_parts(LayerShape.of(with_hold(job, max(1.0, load) if capacity is None else capacity)))
    assert all(each.get(item, 0) <= bound[item] for each in ranks for item in ROWS)
    if capacity is None:
        assert all(max(each.get(item, 0) for each in ranks) == bound[item] for item in ROWS)
    if favour > 3.5:
        assert load > min(1.5, (capacity or 2.0) - 0.3)


def test_a_load_that_bytes_hold_for_costs_no_seconds() -> None:
    """Bytes as of a load of 2, seconds as of a balanced one; a job's digest tells them apart."""
    job = mixtral()
    held, loaded = with_hold(job, 2.0), with_load(job, 2.0)
    assert saved_parts(LayerShape.of(held)) == saved_parts(LayerShape.of(loaded))
    assert memory_of_stages(held)[0] == memory_of_stages(loaded)[0]
    halves = [analytic_profile(each).experts for each in (job, held)]
    assert halves[0].forward_s == halves[1].forward_s
    assert halves[0].exchange_s == halves[1].exchange_s
    assert len({job.digest, held.digest, loaded.digest}) == 3
    for load, said in ((0.5, r"holds .0.5. must be at least load .1."), (4.5, "model.experts.holds .4.5. must be at most 4")):
        with pytest.raises(ValidationError, match=said):
            Job.model_validate(with_hold(job, load).model_dump(by_alias=True))
    with pytest.raises(ValidationError, match=r"holds .1.5. must be at least load .2."):
        Job.model_validate(with_hold(loaded, 1.5).model_dump(by_alias=True))


@pytest.mark.parametrize("dispatcher", ["deepep", "hybridep"])
def test_what_a_flex_dispatcher_leaves(pool_of: Callable[[int], RankPool], dispatcher: str) -> None:
    """Rows that experts are given, to the byte; of the maps beside them no more than is priced, and not much less."""
    experts = Experts(count=8, per_token=3, ffn=96, dispatcher=dispatcher)  # type: ignore[arg-type]
    job = tiny_job("llama", seq=64, hidden=64, expert=2, replicas=2, experts=experts)
    ranks = pool_of(job.gpus).run(bytes_saved_by_items, job)
    saved = {item: sum(each.get(item, 0) for each in ranks) for item in ("input", *experts.section.names)}
    parts = {item: job.gpus * size for item, size in saved_parts(LayerShape.of(job)).items()}
    rows = ("input", "pre_mlp_layernorm", "experts_fc1", "experts_activation", "experts_fc2", "mlp_bda")
    assert {item: saved[item] for item in rows} == {item: parts[item] for item in rows}
    maps = [sum(each[item] for item in ("router", "dispatch", "combine")) for each in (saved, parts)]
    assert 0.8 * maps[1] < maps[0] <= maps[1]


def test_a_fused_exchange_sends_a_token_once_to_each_rank_and_once_to_each_other_node() -> None:
    """8 of 64 experts on 16 ranks of two nodes: of eight choices some are on one rank, and nearly all tokens go to both nodes."""
    job = mixtral()
    cluster, model = job.cluster, job.model
    own = {"count": 64, "per_token": 8, "ffn": 1024}
    sent = {}
    for name in ("alltoall", "deepep"):
        spread = job.model_copy(update={"parallel": job.parallel.model_copy(update={"expert": 16})})
        job = spread.model_copy(update={"model": model.model_copy(update={"experts": Experts(**own, dispatcher=name)})})
        sent[name] = analytic_profile(job).experts.exchange_s
    assert expected_parts(Experts(**own), 16) == pytest.approx(16 * (1 - comb(60, 8) / comb(64, 8)))
    token_bytes, nodes = 2 * 4096 * 4096, 2 * (1 - comb(32, 8) / comb(64, 8))
    shared = cluster.node.gpus / cluster.nic.per_node
    assert sent["deepep"] == pytest.approx(cluster.nic.seconds(shared * token_bytes * nodes / 2))
    assert sent["deepep"] < sent["alltoall"] / 3
