"""Measuring a real layer: nothing is missed, and what is found is what shapes say."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest

from megatron_lynx.anatomy import DENSE, HALVES, PASSES
from megatron_lynx.cli.answers import profile_in_words
from megatron_lynx.config.experts import Experts
from megatron_lynx.errors import ConfigError
from megatron_lynx.kinds.planning import flops_of, half_tensors, planning_of
from megatron_lynx.planner import make_plan
from megatron_lynx.profiler.measured import messages_of
from megatron_lynx.profiler.profile import HalfProfile, load_profile, save_profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.testbed import cpu_device
from megatron_lynx.testbed.fusions import compiles, fusions_of
from megatron_lynx.testbed.links import Links
from megatron_lynx.testbed.profiling import check_measurable, measure_profile
from megatron_lynx.testbed.ranks import Hosts, hosts_for
from tests.instruments.compiler import COMPILER
from tests.profiler.on_ranks import measure_experts, measure_lengthened, measure_messages, measure_one, measure_squaring
from tests.te_releases import folder_of, pool_with
from tests.tiny_jobs import tiny_job
from tests.transparency.opaque_layers import delta_net_in

NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
JOBS = {
    "gpt with dropout": tiny_job("gpt", micro=1),
    "gpt, two sequences": tiny_job("gpt", **NO_DROPOUT),
    "gpt in bf16": tiny_job("gpt", micro=1, dtype="bf16", **NO_DROPOUT),
    "gpt in bf16 with dropout": tiny_job("gpt", micro=1, dtype="bf16"),
    "llama, grouped": tiny_job("llama"),
    "llama, a head of keys each": tiny_job("llama", kv_groups=4),
    "grouped without rotary": tiny_job("gpt", kv_groups=2, bias=False),
    "queries and keys normed": tiny_job("gpt", micro=1, qk_norm=True, **NO_DROPOUT),
    "queries and keys normed, in bf16": tiny_job("gpt", micro=1, qk_norm=True, dtype="bf16", **NO_DROPOUT),
    "queries and keys normed, grouped": tiny_job("llama", qk_norm=True),
    "queries and keys normed, grouped without rotary": tiny_job("gpt", kv_groups=2, qk_norm=True, bias=False),
    "a shard, queries and keys normed": tiny_job("llama", tensor=2, qk_norm=True, norm="layernorm"),
    "a shard": tiny_job("llama", tensor=2),
    "a shard with sequence parallelism": tiny_job("gpt", tensor=2, sequence_parallel=True),
    "heads wider than hidden / heads": tiny_job("llama", kv_channels=16),
    "a shard, narrow heads": tiny_job("gpt", tensor=2, kv_channels=4, qk_norm=True, **NO_DROPOUT),
    "squared ReLU": tiny_job("gpt", activation="squared_relu", bias=False, **NO_DROPOUT),
    "squared ReLU, with biases, in bf16": tiny_job("gpt", micro=1, activation="squared_relu", dtype="bf16"),
}


def blocks(tensors):
    return Counter((tensor.made_by, tensor.saved_by, tensor.bytes) for tensor in tensors)


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS.keys())
def test_a_real_layer_saves_what_its_shape_says(pool_of, job):
    measured = pool_of(1).run(measure_one, job)[0]
    shape = LayerShape(job.model, job.parallel, job.batch.micro)
    for half in HALVES:
        assert blocks(measured[half].tensors) == blocks(half_tensors(shape, half))
        assert measured[half].input_bytes == shape.input_bytes
        assert {item: measured[half].items[item].flops for item in DENSE[half].names} == {
            item: flops_of(shape)[item] for item in DENSE[half].names
        }


def test_every_item_has_its_seconds(pool_of):
    measured = pool_of(1).run(measure_one, tiny_job("llama"))[0]
    for half in HALVES:
        items = measured[half].items
        assert all(items[item].forward_s > 0 and items[item].backward_s > 0 for item in DENSE[half].names)
        assert all(items[item].dgrad_s > 0 and items[item].wgrad_s > 0 for item in items if item.startswith("linear_"))
        assert measured[half].saved_bytes == measured[half].input_bytes + sum(item.saved_bytes for item in items.values())


def test_a_block_is_timed_both_ways(pool_of):
    seconds, held = pool_of(1).run(measure_squaring)[0]
    assert seconds.forward_s > 0
    assert seconds.backward_s > 0
    assert held == {"given": 0, "made": 32, "own rows": 16}


def test_ranks_agree_on_the_links(pool_of):
    kinds, sizes = ("all_reduce", "all_gather", "reduce_scatter", "p2p", "host"), (4096, 65536)
    one, other = pool_of(2).run(measure_messages, kinds, sizes)
    assert one == other, "every rank plans with the same figures"
    assert [(point.kind, point.bytes) for point in one] == [(kind, size) for kind in kinds for size in sizes]
    assert all(point.seconds > 0 for point in one)


def test_a_collective_disturbs_what_it_slows_and_nothing_else(pool_of):
    for longer in (1.0, 3.0):
        assert pool_of(2).run(measure_lengthened, longer) == [longer] * 2


def test_links_of_a_gpu_machine_are_measured_and_named():
    """Copies to the host were free in a measured profile, and no screen said which links it was measured on."""
    job = tiny_job("llama", tensor=2, sequence_parallel=True)
    assert set(messages_of(job)) == {"all_gather", "reduce_scatter"}
    on_gpus = job.model_copy(update={"cluster": job.cluster.model_copy(update={"device": "cuda"})})
    assert messages_of(on_gpus)["host"] == messages_of(on_gpus)["all_gather"] // 2, "of own rows"


TE = {"implementation": "transformer_engine", "dtype": "bf16", "bias": False, "position": "learned", **NO_DROPOUT}
TE_JOBS = {
    "norms inside": tiny_job("gpt", **TE),
    "a shard with sequence parallelism": tiny_job("gpt", tensor=2, sequence_parallel=True, norm="rmsnorm", **TE),
}


@pytest.fixture(scope="module")
def te_pool():
    with pool_with("2.9", 1) as pool:
        yield pool


def test_a_norm_inside_a_linear_is_told_apart(te_pool):
    """Of Transformer Engine's layer, beside its attention, which is unfused on a CPU. What its linears do is less by the norm."""
    for job in TE_JOBS.values():
        [measured] = te_pool.run(measure_one, job)
        shape = replace(LayerShape.of(job), device="cuda")
        for half in HALVES:
            assert sizes(measured[half].tensors) == sizes(half_tensors(shape, half))
            items = measured[half].items
            norm, linear = items[DENSE[half].norm], items[DENSE[half].column_parallel]
            assert min(norm.forward_s, norm.backward_s) > 0
            assert min(linear.forward_s, linear.backward_s, linear.dgrad_s, linear.wgrad_s) >= 0
            assert linear.flops == flops_of(shape)[DENSE[half].column_parallel]


def sizes(tensors):
    """Bytes by who made and who saved them, without what the attention makes, and what only it reads."""
    found = Counter()
    for tensor in tensors:
        if "core_attention" not in (tensor.made_by, *tensor.saved_by):
            found[tensor.made_by, tensor.saved_by] += tensor.bytes
    return found


def test_seconds_of_a_stand_in_are_marked_and_plans_say_so(monkeypatch):
    job = tiny_job("gpt", **TE)
    monkeypatch.syspath_prepend(folder_of("TRANSFORMER_ENGINE", "2.9", "transformer_engine"))
    hosts = hosts_for(job)
    profile = measure_profile(job, hosts, lambda text: nullcontext())
    assert profile.source.stood_in_for == "Transformer Engine's kernels"
    assert "a stand-in for Transformer Engine's kernels" in make_plan(job, profile).provenance.note
    local = profile.model_copy(update={"source": profile.source.model_copy(update={"stood_in_for": None})})
    assert make_plan(job, local).provenance.note is None


@pytest.mark.streams
def test_fusions_of_the_job_are_measured_and_stated(monkeypatch):
    """Bias-gelu saves what the GEMM made and the bias; without fusion their sum is saved instead, and what is made of it."""
    monkeypatch.setenv(COMPILER, "aot_eager")
    monkeypatch.setattr("megatron_lynx.testbed.profiling.HOST_ROUNDS", 1)
    fused = measure_profile(
        tiny_job("gpt", fusions=("bias_activation", "bias_dropout")), Hosts(1, "cpu", Links()), lambda text: nullcontext()
    )
    assert fused.source.fusions == ("bias_dropout", "bias_activation")
    assert {tensor.made_by for tensor in fused.mlp.tensors} >= {"linear_fc1", "activation", "mlp_bda"}
    assert [tensor.made_by for tensor in fused.mlp.tensors if tensor.saved_by == ("activation",)] == ["linear_fc1"]


@pytest.mark.parametrize(
    ("fusion", "needed"), [("rope", "Transformer Engine, whose kernel"), ("bias_activation", "biases"), ("bias_dropout", "a GPU")]
)
def test_fusions_that_layers_cannot_have_are_refused(fusion, needed):
    job = tiny_job("gpt", bias=False, fusions=(fusion,))
    with pytest.raises(ConfigError, match=needed):
        hosts_for(job)


def test_on_gpus_fusions_are_a_launchs_unless_the_job_says_others():
    def on_gpus(**model):
        job = tiny_job("llama", **model)
        return job.model_copy(update={"cluster": job.cluster.model_copy(update={"device": "cuda"})})

    assert fusions_of(tiny_job("llama")) == ()
    assert fusions_of(on_gpus(activation="squared_relu")) == ("bias_dropout",), "Megatron would stop at its bias being fused"
    assert set(fusions_of(on_gpus())) - {"rope"} == {"bias_dropout", "bias_activation"}
    assert compiles(on_gpus())
    assert fusions_of(on_gpus(fusions=("bias_dropout",))) == ("bias_dropout",)
    assert not compiles(on_gpus(fusions=()))


def test_transformer_engine_that_is_not_there_is_asked_for(monkeypatch):
    monkeypatch.setattr(cpu_device, "TRANSFORMER_ENGINE", "transformer_engine_of_nobody")
    with pytest.raises(ConfigError, match="Transformer Engine on the import path"):
        measure_profile(tiny_job("gpt", **TE), hosts=None, announce=None)


LATENT = {"q_rank": 12, "kv_rank": 8, "head_size": 8, "rope_size": 4, "value_head_size": 6}


@pytest.mark.parametrize("fused", [True, False])
def test_latent_attention_is_measured(te_pool, monkeypatch, fused):
    """Both its paths, with the kernel that turns queries where they lie and without: bytes are those of its shape up to the core
    attention, which is stood in for. Such jobs were refused."""
    job = tiny_job("gpt", latent=LATENT | {"fused_rotary": fused}, qk_norm=True, tensor=2, **TE | {"position": "rope"})
    [measured] = te_pool.run(measure_one, job)
    section, shape, found = job.model.halves["attention"], replace(LayerShape.of(job), device="cuda"), measured["attention"]
    monkeypatch.syspath_prepend(folder_of("TRANSFORMER_ENGINE", "2.9", "transformer_engine"))
    check_measurable(job)
    assert sizes(found.tensors) == sizes(half_tensors(shape, "attention"))
    assert all(found.items[name].flops == flops_of(shape)[name] for name in section.names)
    for linear in (item for item in section.items if item.is_linear):
        seconds = found.items[linear.name]
        assert min(seconds.dgrad_s, seconds.wgrad_s) > 0
        assert linear.norm_inside or min(seconds.forward_s, seconds.backward_s) > 0, "both down-projections read one tensor"


EXPERTS = Experts(count=8, per_token=3, ffn=96)
SHARED = EXPERTS.model_copy(update={"shared_ffn": 48})
FUSED = {"bias_activation_fusion": True, "moe_grouped_gemm": True}
ROWS = ("experts_fc1", "experts_activation", "experts_fc2")


def tiny_experts(experts=SHARED, **fields):
    return tiny_job("llama", **{"seq": 64, "hidden": 64, "expert": 2, "replicas": 2, "experts": experts, **fields})


def kept_by(half):
    """Bytes by who made and who saved them, without the router's and the dispatcher's maps, which are many and small."""
    kept = Counter()
    for tensor in half.tensors:
        if "router" not in (tensor.made_by, *tensor.saved_by[:1]) and tensor.saved_by != ("dispatch",):
            kept[tensor.made_by, tensor.saved_by, tensor.output] += tensor.bytes
    return kept


def check_experts(half, job):
    section, shape = job.model.experts.section, LayerShape.of(job)
    figures = planning_of(section)
    priced = HalfProfile(input_bytes=shape.input_bytes, items={}, tensors=figures.tensors(shape))
    assert kept_by(half) == kept_by(priced)
    assert half.input_bytes == priced.input_bytes
    assert 0 <= half.saved_bytes - priced.saved_bytes <= (2 * job.model.experts.count + 1) * 4, "an auxiliary loss's counts"
    assert {item.name: half.items[item.name].output_bytes for item in section.items} == {
        item.name: figures.output_bytes(shape, item) for item in section.items
    }
    flops = {name: half.items[name].flops for name in section.names if name != "router"}
    assert flops == {name: count for name, count in figures.flops(shape).items() if name != "router"}


@pytest.mark.parametrize(
    "job",
    [
        tiny_experts(),
        tiny_experts(EXPERTS, expert=1, replicas=1, bias=False, activation="gelu"),
        tiny_experts(EXPERTS, tensor=2, sequence_parallel=True, expert_tensor=1, replicas=1),
        tiny_experts(EXPERTS.model_copy(update={"dispatcher": "allgather"})),
        tiny_experts(EXPERTS.model_copy(update={"load": 1.5})),
    ],
    ids=["shared out, with shared ones", "one rank", "a shard's rows", "gathered", "one rank has more"],
)
def test_experts_are_measured_over_their_ranks(pool_of, job):
    """Structure is exactly what is predicted: the first rank has the load that a job states, to the row."""
    ranks = pool_of(job.gpus).run(measure_experts, job)
    check_experts(ranks[0], job)
    items = ranks[0].items
    assert all(items[name].forward_s > 0 and items[name].backward_s > 0 for name in items)
    assert all(items[name].dgrad_s + items[name].wgrad_s == pytest.approx(items[name].backward_s) for name in ROWS[::2])
    assert (ranks[0].exchange_s > 0) == (job.parallel.expert > 1)
    assert sum(map(ranks[0].waits_s, PASSES)) == pytest.approx(4 * ranks[0].exchange_s)
    assert len({half.exchange_s for half in ranks}) == 1, "of the slowest rank"
    if job.model.experts.load > 1:
        assert all(half.items[name].saved_bytes < items[name].saved_bytes for half in ranks[1:] for name in ROWS[1:])


def test_memory_of_measured_experts_is_that_of_the_load_it_is_counted_for(pool_of):
    job = tiny_experts(EXPERTS.model_copy(update={"holds": 1.75}))
    held, loaded = tiny_experts(EXPERTS.model_copy(update={"load": 1.75})), tiny_experts(EXPERTS)
    [half, _] = pool_of(2).run(measure_experts, job)
    assert kept_by(half) == kept_by(HalfProfile(input_bytes=0, items={}, tensors=half_tensors_of(held)))
    assert half.items["experts_fc1"].flops == planning_of(EXPERTS.section).flops(LayerShape.of(loaded))["experts_fc1"]


def half_tensors_of(job):
    return planning_of(job.model.experts.section).tensors(LayerShape.of(job))


def test_grouped_experts_of_transformer_engine_are_measured(te_pool):
    """One module of all experts, as on a GPU: its tensors are those of its shape, its FLOPs too, which torch does not count."""
    job = tiny_experts(EXPERTS, expert=1, replicas=1, **TE | {"fusions": ("bias_activation",)})
    [half] = te_pool.run(partial(measure_experts, **FUSED), job)
    check_experts(half, job)


def test_a_job_with_experts_is_profiled_and_planned(monkeypatch, tmp_path):
    """It was refused. The dense first layer and the others have figures of their own."""
    monkeypatch.setattr("megatron_lynx.testbed.profiling.HOST_ROUNDS", 1)
    job = tiny_experts(SHARED.model_copy(update={"layers": ("2-4",)}))
    hosts = hosts_for(job)
    profile = measure_profile(job, hosts, lambda text: nullcontext())
    save_profile(profile, tmp_path / "profile.yaml")
    shown = profile_in_words(profile, tmp_path).splitlines()
    assert [line.split()[0] for line in shown[:5]] == ["attention", "mlp", "experts", "exchange", "links"]
    assert "links      measured: none of this job; ranks talk over this machine's loopback" in shown[4]
    assert load_profile(tmp_path / "profile.yaml") == profile
    plan = make_plan(job, profile)
    assert all(("router" in rule.keep) == (rule.layers.first > 1) for stage in plan.stages for rule in stage.rules)
    assert plan.stages[0].predicted.step_s > 3 * 2 * sum(map(profile.experts.waits_s, PASSES))


REFUSED = {
    "parallel.expert_tensor: found 2, needed 1": tiny_job("llama", tensor=2, sequence_parallel=True, experts=EXPERTS),
    "parallel.tensor: found 2 with shared experts": tiny_job(
        "llama", tensor=2, sequence_parallel=True, expert_tensor=1, expert=2, experts=SHARED
    ),
    "model.experts.drops: found true, needed false": tiny_experts(EXPERTS.model_copy(update={"drops": True})),
    "model.experts.dispatcher: found deepep, needed DeepEP": tiny_experts(EXPERTS.model_copy(update={"dispatcher": "deepep"})),
    "model.opaque: found gated_delta_net": tiny_job("llama", opaque=delta_net_in([1])),
}


@pytest.mark.parametrize("message", REFUSED)
def test_layers_that_cannot_be_measured_are_refused_by_name(message):
    """Gated delta nets ended in a traceback, after the measurement."""
    with pytest.raises(ConfigError, match=message):
        check_measurable(REFUSED[message])
