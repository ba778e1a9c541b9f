"""What stock settings hold, byte by byte, on ranks with the real megatron-core; and Transformer Engine's Python, stood in for.

What a checkpoint remembers of random states is on the host on GPUs but for a few bytes, and not priced; here they are counted.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron_lynx.cost.recompute import kept_bytes
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.stock.layer import layer_bytes
from megatron_lynx.stock.setting import FULL, NONE, SELECTIVE, StockSetting, block
from megatron_lynx.stock.stage import StockStage
from megatron_lynx.testbed.ranks import RankPool
from tests.config.jobs import catalogued_job
from tests.stock.on_ranks import copies, hold
from tests.te_releases import pool_with
from tests.tiny_jobs import tiny_job

STATE = torch.get_rng_state().nbytes
STATES = 3 * STATE
"""What one checkpoint remembers: the CPU's, the device's, and the tracker's."""
ODD = STATE + 512
"""A checkpoint may share a state with another one, or a layer with the ends of the model; and gloo still has rows of an exchange,
a float each."""

SIZE = {"seq": 64, "micro": 2, "hidden": 64, "ffn": 256, "microbatches": 1}
LEAST = 64
"""Elements of the smallest tensor that these tiny models offload."""

RECOMPUTED = (SELECTIVE, StockSetting(recompute=("mlp",)), StockSetting(recompute=("core_attn", "mlp")))


@pytest.mark.parametrize(
    ("like", "fields"),
    [
        ("gpt", {"bias": False}),
        ("llama", {}),
        ("gpt", {"bias": False, "kv_groups": 2}),
        ("llama", {"tensor": 2, "sequence_parallel": True}),
    ],
    ids=str,
)
def test_a_layer_with_recomputed_modules_holds_what_is_priced(pool_of, like, fields):
    """Grouped keys and values were forgotten: a checkpoint of eager attention holds them as they were before it repeats them."""
    jobs = [tiny_job(like, layers=layers, **SIZE, **fields) for layers in (2, 4)]
    settings = (NONE, *RECOMPUTED)
    few, many = pool_of(jobs[0].gpus).run(hold, jobs, [setting.fields for setting in settings])[0]
    shape = LayerShape.of(jobs[0])
    for setting, less, more in zip(settings, few, many, strict=True):
        stays = sum(half.stays for half in layer_bytes(shape, setting))
        checkpoints = len(setting.recompute)
        expected = pytest.approx(stays + STATES * checkpoints, abs=ODD * max(1, checkpoints))
        assert (more - less) / 2 == expected, setting.name


def test_a_checkpoint_of_the_attention_holds_its_own_keys_and_values() -> None:
    """Where ranks exchange them in turns, those of every rank were priced as recomputed."""
    exchanges = ({"context_exchange": "all_gather"}, {}, {"context_exchange": "a2a"})
    layout = {"tensor": 2, "context": 2, "pipeline": 8, "sequence_parallel": True}
    shapes = [LayerShape.of(catalogued_job(parallel=layout | exchange)) for exchange in exchanges]
    gathered, *others = (sum(half.stays for half in layer_bytes(shape, SELECTIVE)) for shape in shapes)
    assert others == [gathered, gathered]
    assert all(gathered < kept_bytes(shape) for shape in shapes)


EXPERTS = {"count": 4, "per_token": 2, "ffn": 96}
COUNTERS = 4608
"""What routers and dispatchers are priced to hold of a layer more than is counted: experts that were chosen twice, and what a
dispatcher holds from forward to forward, which a count of one step does not see."""


def of_a_layer(pool, jobs, settings, **model):
    """What stock none and these hold of a layer with experts, counted and priced. `jobs`: the one with more layers first, as
    Megatron keeps one table of auxiliary losses."""
    settings, shape = (NONE, *settings), LayerShape.of(jobs[0])
    many, few = pool.run(hold, jobs, [setting.fields for setting in settings], model)[0]
    layers = jobs[0].model.layers - jobs[1].model.layers
    counted = [(more - less) / layers for more, less in zip(many, few, strict=True)]
    return counted, [sum(half.stays for half in layer_bytes(shape, setting, shape.model.sections(1))) for setting in settings]


@pytest.mark.long
def test_experts_made_again_hold_what_is_priced(pool_of):
    """A story: `moe` seemed to hold a tenth less than is priced. A dispatcher keeps the graph of its last backward, with two
    tensors as large as the layer's input and random states, until the next forward lets go of it. That forward then seemed to
    need so much less."""
    jobs = [tiny_job("llama", layers=layers, experts=EXPERTS | {"shared_ffn": 48}, **SIZE) for layers in (4, 2)]
    settings = [StockSetting(recompute=(module,)) for module in ("shared_experts", "moe")]
    counted, priced = of_a_layer(pool_of(1), jobs, settings)
    for held, said, states in zip(counted, priced, (0, STATES, STATES), strict=True):
        assert -COUNTERS <= held - said - states <= 0


@pytest.mark.long
@pytest.mark.parametrize("precision", [{}, {"fp8": {"recipe": "blockwise"}, "bias": False}], ids=str)
def test_outputs_of_experts_that_are_made_again_are_let_go(te_pool, precision):
    """The activation only where one GEMM computes for all experts of a rank, norms only with Transformer Engine. In FP8 linears
    behind them keep what they were given, which is let go, in place of its bytes. What they spare is priced but for random
    states, of which checkpoints of a layer share some."""
    fields = {"implementation": "transformer_engine", "experts": EXPERTS, "dtype": "bf16", **precision}
    jobs = [tiny_job("llama", layers=layers, **SIZE, **fields) for layers in (4, 2)]
    settings = [StockSetting(recompute=modules) for modules in (("moe_act",), ("layernorm", "moe_act"))]
    counted, priced = of_a_layer(te_pool, jobs, settings, moe_grouped_gemm=True, bias_activation_fusion=True)
    for setting, held, said in zip(settings, counted[1:], priced[1:], strict=True):
        states = priced[0] - said - (counted[0] - held)
        assert 0 <= states <= STATES * len(setting.recompute), setting.name


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
def test_an_offloaded_input_of_experts_is_saved_in_16_bits(te_pool, recipe):
    """A CPU's tensors stay: everything that leaves a GPU is counted here, and these tiny ones are below the price's threshold.
    Every token goes to all experts, so that rows are as many as priced."""
    mixture = EXPERTS | {"per_token": EXPERTS["count"]}
    fields = {
        "implementation": "transformer_engine",
        "experts": mixture,
        "dtype": "bf16",
        "fp8": {"recipe": recipe},
        "bias": False,
    }
    jobs = [tiny_job("llama", layers=layers, **SIZE, **fields) for layers in (4, 2)]
    setting = StockSetting(offload=("expert_fc1",))
    (none, held), (none_priced, priced) = of_a_layer(te_pool, jobs, [setting], moe_grouped_gemm=True, bias_activation_fusion=True)
    assert held - none == priced - none_priced > 0


def test_blocks_hold_what_is_priced(pool_of):
    job = tiny_job("llama", **SIZE)
    settings = [NONE, *(block(layers) for layers in (1, 2, 3)), FULL]
    (held,) = pool_of(1).run(hold, [job], [setting.fields for setting in settings])[0]
    layers = [StockStage(job, setting, 0).chunks[0] for setting in settings]
    stays = [sum(layer.bytes.stays for layer in each) for each in layers]
    for each, counted, priced in zip(layers, held, stays, strict=True):
        whole = sum(layer.whole for layer in each)
        assert counted - held[0] == pytest.approx(priced - stays[0] + STATES * whole, abs=ODD)


@pytest.fixture(scope="module")
def te_pool() -> Iterator[RankPool]:
    with pool_with("2.9", 1) as pool:
        yield pool


OFFLOADED = (("qkv_linear",), ("core_attn",), ("core_attn", "attn_proj"), ("qkv_linear", "core_attn", "attn_proj"))


def te_job(layers):
    return tiny_job("gpt", implementation="transformer_engine", bias=False, layers=layers, **SIZE)


def small(setting):
    return setting.fields | {"min_offloaded_tensor_size": LEAST}


def on_a_cpu(setting):
    """What leaves a layer of this stand-in, whose attention is one of eager operators."""
    te, local = (LayerShape.of(job) for job in (te_job(2), tiny_job("gpt", bias=False, **SIZE)))
    core = [name for name in setting.offload if name == "core_attn"]
    others = [name for name in setting.offload if name not in core]
    alone = StockSetting(recompute=setting.recompute, offload=tuple(core))
    eager = sum(half.leaves for half in layer_bytes(local, alone, least=LEAST))
    together = sum(half.leaves for half in layer_bytes(te, setting, least=LEAST))
    without = sum(half.leaves for half in layer_bytes(te, alone, least=LEAST))
    return eager + together - without if others else eager


def test_what_stock_offloads_leaves_the_device(te_pool):
    """The top layer's stays, because its backward comes next."""
    settings = [NONE, *(StockSetting(offload=modules) for modules in OFFLOADED)]
    settings += [StockSetting(recompute=("mlp",), offload=modules) for modules in OFFLOADED[-1:]]
    few, many = te_pool.run(hold, [te_job(2), te_job(4)], [small(setting) for setting in settings])[0]
    shape = LayerShape.of(te_job(2))
    for setting, less, more in zip(settings, few, many, strict=True):
        again = sum(half.again for half in layer_bytes(shape, setting))
        gone = on_a_cpu(setting) + again - STATES * len(setting.recompute)
        assert (more - less) / 2 == pytest.approx((many[0] - few[0]) / 2 - gone, abs=ODD), setting.name
        left = many[0] - more - 4 * (again - STATES * len(setting.recompute))
        assert left == pytest.approx(3 * on_a_cpu(setting), abs=2 * ODD), f"{setting.name}: of three layers of four"


def test_copies_come_back_ahead_unless_whole_layers_are_recomputed(te_pool):
    """As `copying` prices them: three layers of four go out and are asked for ahead; with whole layers, nothing is."""
    modules = ("qkv_linear",)
    (ahead,) = te_pool.run(copies, te_job(4), small(StockSetting(offload=modules)))
    tensors = 4  # input, norm's output, mean and deviation
    assert ahead == "o" * 3 * tensors + "b" * 3 * tensors
    (late,) = te_pool.run(copies, te_job(4), small(StockSetting(method="block", layers=2, offload=modules)))
    assert "b" not in late
    assert late.count("o") == late.count("d") > 2 * tensors
