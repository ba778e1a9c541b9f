"""The table of legal settings against the validation of every release: its own TransformerConfig is run with each setting."""

from __future__ import annotations

from itertools import chain, combinations

import pytest

from megatron_lynx.stock.legality import Facts, objections
from megatron_lynx.stock.setting import FULL, NONE, OFFLOADED, RECOMPUTED, StockSetting, block
from megatron_lynx.testbed.ranks import RankPool
from tests.stock.on_ranks import accepts
from tests.te_releases import folder_of, python_path
from tests.tiny_jobs import tiny_job

RELEASES = ("0.15", "0.16", "0.17", "0.18", "0.19", "0.20")
INSTALLED = "0.16"

MODELS = {
    "dense": (frozenset(), {}),
    "experts": (frozenset({"experts", "grouped_gemm"}), {"num_moe_experts": 2, "moe_grouped_gemm": True}),
    "latent": (frozenset({"latent"}), {"multi_latent_attention": True}),
    "shared experts": (
        frozenset({"experts", "shared_experts"}),
        {"num_moe_experts": 2, "moe_shared_expert_intermediate_size": 16, "moe_token_dispatcher_type": "alltoall"},
    ),
}
DELTA_NET = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 2,
    **dict.fromkeys(("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
}
"""A gated delta net, which 0.15 does not have."""
OVERLAP = {"moe_shared_expert_overlap": True}
EXPERTS = {"count": 2, "per_token": 1, "ffn": 16}
COMBINED = {
    "one stage": ({}, {}),
    "gathers": ({"experts": EXPERTS | {"dispatcher": "allgather"}}, {"moe_token_dispatcher_type": "allgather"}),
    "one rank": ({"expert": 1}, {"expert_model_parallel_size": 1}),
    "fp32": ({"dtype": "fp32"}, {"bf16": False}),
    "a pipeline": ({"pipeline": 2}, {"pipeline_model_parallel_size": 2, "pipeline_dtype": "bf16"}),
    "chunks": (
        {"pipeline": 2, "layers_per_chunk": 1},
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, "pipeline_dtype": "bf16", "num_layers": 4},
    ),
    "shared experts beside it": (
        {"experts": EXPERTS | {"shared_ffn": 16, "whole": True, "shared_beside": True}},
        {"moe_shared_expert_intermediate_size": 16, **OVERLAP},
    ),
}
"""Changes of a job whose experts are on two ranks, and fields, in which exchanges may be overlapped, or not."""
OVERLAPPED = [
    StockSetting(recompute=modules, overlap=overlap, delayed=delayed)
    for modules in ((), ("layernorm",), ("moe",))
    for overlap, delayed in ((True, False), (True, True), (False, True))
] + [StockSetting(method="uniform", layers=1, overlap=True), StockSetting(offload=("core_attn",), overlap=True)]


def subsets(names):
    return chain.from_iterable(combinations(names, count) for count in range(len(names) + 1))


RECOMPUTE_SETS = list(subsets([*RECOMPUTED]))
OFFLOAD_SETS = list(subsets([*OFFLOADED]))
SETTINGS = [
    NONE,
    FULL,
    *(block(layers) for layers in (0, 1, 2)),
    StockSetting(method="uniform"),
    *(StockSetting(recompute=modules) for modules in RECOMPUTE_SETS if modules),
    *(StockSetting(offload=modules) for modules in OFFLOAD_SETS if modules),
    *(StockSetting(recompute=("mlp", "moe"), offload=modules) for modules in OFFLOAD_SETS if modules),
    *(StockSetting(offload=("core_attn",), fraction=share) for share in (-0.5, 0.0, 0.5, 1.5)),
    StockSetting(method="block", layers=1, offload=("core_attn",)),
    StockSetting(recompute=("no_such_module",)),
    StockSetting(offload=("no_such_module",)),
]


@pytest.fixture(scope="module", params=RELEASES)
def release_pool(request):
    env = {}
    if request.param != INSTALLED:
        env = {"PYTHONPATH": python_path(folder_of("MEGATRON_CORE", request.param, "megatron/core"))}
    with RankPool(1, env=env) as pool:
        yield request.param, pool


def has(release, *facts, **fields):
    return Facts(tiny_job("gpt", **fields), release, frozenset(facts))


def test_what_a_release_accepts_is_exactly_what_the_table_calls_legal(release_pool):
    release, pool = release_pool
    asked = [(has(release, *facts), fields, setting) for facts, fields in MODELS.values() for setting in SETTINGS]
    if release > "0.15":
        asked += [(has(release, "gated_delta"), DELTA_NET, setting) for setting in SETTINGS]
    shared, fields = MODELS["shared experts"]
    asked += [(has(release, *shared, "shared_overlap"), fields | OVERLAP, setting) for setting in SETTINGS]
    delayed = has(release, implementation="transformer_engine", bias=False, dtype="bf16", fp8={"recipe": "delayed"})
    asked += [
        (delayed, {"fp8": "e4m3", "fp8_recipe": "delayed"}, StockSetting(recompute=modules))
        for modules in RECOMPUTE_SETS
        if modules
    ]
    mixed = {"num_moe_experts": 2, "expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall", "bf16": True}
    for changes, more in COMBINED.values():
        job = tiny_job("llama", **{"experts": EXPERTS, "expert": 2, "dtype": "bf16", **changes}, replicas=2)
        asked += [(Facts.of(job, release), mixed | more, each) for each in OVERLAPPED]
    (answers,) = pool.run(accepts, [fields | setting.fields for _, fields, setting in asked])
    wrong = [
        (setting, refused, answer)
        for (facts, _, setting), answer in zip(asked, answers, strict=True)
        if bool(refused := [*objections(setting, facts, "config")]) != (answer is not None)
    ]
    assert wrong == []
    legal = sum(answer is None for answer in answers)
    assert 100 < legal < len(asked) - 100, "both kinds were asked for"


def test_what_is_accepted_and_cannot_train_is_said_apart():
    def said(setting, facts):
        assert not [*objections(setting, facts, "config")]
        return " ".join(objections(setting, facts, "launch", "training"))

    offloading, te = StockSetting(offload=("core_attn",)), {"implementation": "transformer_engine", "bias": False}
    assert "Transformer Engine" in said(offloading, has("0.19"))
    assert said(offloading, has("0.19", **te)) == ""
    both = StockSetting(method="block", layers=1, offload=("core_attn",))
    assert said(both, has("0.19", **te)) == ""
    assert "loses its place" in said(both, has("0.19", **te, pipeline=2))
    overlap, experts = StockSetting(overlap=True), {"experts": EXPERTS, "expert": 2, "dtype": "bf16", "replicas": 2}
    assert "backward_dw" in said(overlap, has("0.16", "gated_delta", **experts))
    assert said(overlap, has("0.16", **experts)) == said(overlap, has("0.17", "gated_delta", **experts)) == ""
    assert "without end" in said(StockSetting(recompute=("mlp",)), has("0.19", bias=True))
    assert said(StockSetting(recompute=("mlp",)), has("0.19", bias=False)) == ""


def test_a_setting_says_its_flags_and_its_name():
    setting = StockSetting(recompute=("mlp",), offload=("core_attn", "attn_proj"), fraction=0.5)
    assert setting.name == "mlp, offload core_attn + attn_proj (0.50 of the layers)"
    assert setting.flags == (
        "--recompute-granularity selective",
        "--recompute-modules mlp",
        "--fine-grained-activation-offloading",
        "--offload-modules core_attn attn_proj",
        "--activation-offload-fraction 0.5",
    )
    assert [each.name for each in (NONE, FULL, block(3))] == ["none", "full", "block 3"]
