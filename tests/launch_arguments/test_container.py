"""Planning for Megatron-Bridge, of containers as it writes them; without Bridge."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_lynx.config.model import Adapters
from megatron_lynx.errors import ConfigError
from megatron_lynx.launch_arguments import Reading, job_of, read_launch
from megatron_lynx.yaml_file import write_yaml
from tests.test_cli import lynx

PROVIDER = "megatron.bridge.models.gpt_provider"
MODEL = {
    "_target_": f"{PROVIDER}.GPTModelProvider",
    "num_layers": 8,
    "hidden_size": 1024,
    "ffn_hidden_size": 3584,
    "num_attention_heads": 16,
    "num_query_groups": 4,
    "seq_length": 2048,
    "gated_linear_unit": True,
    "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
    "attention_backend": {"_target_": "megatron.core.transformer.enums.AttnBackend", "_args_": [5], "_name_": "auto"},
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "add_bias_linear": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "share_embeddings_and_output_weights": False,
    "transformer_layer_spec": {"_target_": f"{PROVIDER}.default_layer_spec", "_call_": False},
    "transformer_impl": "transformer_engine",
    "cross_entropy_loss_fusion": True,
    "cross_entropy_fusion_impl": "te",
    "bias_dropout_fusion": True,
    "bias_activation_fusion": True,
    "apply_rope_fusion": True,
    "vocab_size": 32000,
    "should_pad_vocab": True,
    "make_vocab_size_divisible_by": 128,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": None,
    "pipeline_model_parallel_layout": None,
    "num_layers_in_first_pipeline_stage": None,
    "context_parallel_size": 1,
    "sequence_parallel": True,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "overlap_p2p_comm": False,
    "tp_comm_overlap": False,
    "params_dtype": {"_target_": "torch.bfloat16", "_call_": False},
    "bf16": False,
}
CONTAINER = {
    "_target_": "megatron.bridge.training.config.ConfigContainer",
    "model": MODEL,
    "train": {"micro_batch_size": 1, "global_batch_size": 32, "train_iters": 100},
    "optimizer": {"optimizer": "adam", "lr": 3e-4, "main_grads_dtype": {"_target_": "torch.float32", "_call_": False}},
    "ddp": {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "bucket_size": None,
        "num_distributed_optimizer_instances": 1,
    },
    "dist": {"use_decentralized_pg": False},
    "tokenizer": {"tokenizer_type": "HuggingFaceTokenizer", "vocab_size": None, "use_tokenizer_vocab_size": False},
    "mixed_precision": "bf16_mixed",
    "comm_overlap": None,
    "peft": None,
}
FLAGS = (
    "--num-layers 8 --hidden-size 1024 --ffn-hidden-size 3584 --num-attention-heads 16 --group-query-attention "
    "--num-query-groups 4 --seq-length 2048 --swiglu --normalization RMSNorm --position-embedding-type rope "
    "--disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --untie-embeddings-and-output-weights "
    "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te --bf16 --vocab-size 32000 --tensor-model-parallel-size 2 "
    "--pipeline-model-parallel-size 2 --sequence-parallel --micro-batch-size 1 --global-batch-size 32 "
    "--use-distributed-optimizer --overlap-grad-reduce"
)


def written(folder: Path) -> str:
    path = folder / "run_config.yaml"
    path.write_text(write_yaml(CONTAINER))
    return str(path)


def read(folder: Path, *changes: str) -> Reading:
    return read_launch(["--bridge", written(folder), *changes], gpus=8)


def test_a_container_is_the_job_of_the_flags_that_say_the_same(tmp_path: Path) -> None:
    reading = read(tmp_path)
    assert job_of(reading, "h100-80g") == job_of(read_launch(FLAGS.split(), gpus=8), "h100-80g")
    origins = {fact.place: fact.origin for fact in reading.facts}
    assert origins["model.layers"] == "cfg.model.num_layers"
    assert origins["batch.global"] == "cfg.train.global_batch_size"
    assert "--" not in origins["model.vocab"]


@pytest.mark.parametrize(
    ("changes", "place", "value"),
    [
        (["model.seq_length=8192"], "model.seq", 8192),
        (["model.transformer_layer_spec=local_layer_spec"], "model.implementation", "local"),
        (["model.gated_linear_unit=False", "model.activation_func=squared_relu"], "model.activation", "squared_relu"),
        (["model.share_embeddings_and_output_weights=true"], "model.tied_embeddings", True),
        (["model.vocab_size=32001", "model.should_pad_vocab=False"], "model.vocab", 32001),
        (["model.vocab_size=32001"], "model.vocab", 32256),
        (["tokenizer.use_tokenizer_vocab_size=True", "tokenizer.vocab_size=1000"], "model.vocab", 1024),
        (["mixed_precision=None", "model.bf16=True", "ddp.grad_reduce_in_fp32=False"], "optimizer.gradients", "bf16"),
        (["ddp.grad_reduce_in_fp32=False"], "optimizer.gradients", "fp32"),
        (["model.num_query_groups=16"], "model.kv_groups", 16),
        (["ddp.num_distributed_optimizer_instances=2"], "parallel.optimizer_instances", 2),
        (
            ["model.pipeline_model_parallel_layout=[['embedding','decoder','decoder','decoder'],"
             "['decoder','decoder','decoder','decoder','decoder','loss']]"],
            "parallel.partition",
            [3, 5],
        ),
        (["model.virtual_pipeline_model_parallel_size=2"], "parallel.partition", [2, 2, 2, 2]),
        (["model.virtual_pipeline_model_parallel_size=2"], "overlap.messages", False),
    ],
)  # fmt: skip
def test_what_bridge_says_in_another_way(changes: list[str], place: str, value: object, tmp_path: Path) -> None:
    facts = {fact.place: fact.value for fact in read(tmp_path, *changes).facts}
    assert facts[place] == value


def test_communication_beside_computing_is_bridges_to_decide(tmp_path: Path) -> None:
    cfg = {**CONTAINER, "comm_overlap": {"tp_comm_overlap": True, "overlap_grad_reduce": None, "bucket_size": None}}
    (tmp_path / "cfg.yaml").write_text(write_yaml(cfg))
    facts = {fact.place: fact.value for fact in read_launch(["--bridge", str(tmp_path / "cfg.yaml")], gpus=8).facts}
    assert facts["overlap.userbuffers"]
    assert facts["overlap.bucket_parameters"] == 128 * 1024 * 1024


def test_problems_are_named_as_bridges_users_name_them(tmp_path: Path) -> None:
    changes = ["model.activation_func=gelu", "train.micro_batch_size=0", "dist.use_decentralized_pg=True", "lora"]
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, *changes, "model.seq_lenth=1")
    assert [problem.where for problem in caught.value.problems] == ["launch", "cfg.model.seq_lenth"]
    assert "did you mean seq_length?" in str(caught.value)
    changes = [*changes[:3], "peft=lora", "model.transformer_layer_spec=mine", "tokenizer.use_tokenizer_vocab_size=True"]
    wheres = {problem.where for problem in read(tmp_path, *changes).problems}
    assert wheres >= {
        "cfg.model.activation_func",
        "cfg.train.micro_batch_size",
        "cfg.dist.use_decentralized_pg",
        "cfg.model.transformer_layer_spec",
        "cfg.tokenizer.vocab_size",
        "cfg.peft",
    }


def test_a_vocabulary_that_is_missing_is_asked_for_once(tmp_path: Path) -> None:
    """Qwen3's recipes take their tokenizer's: `cfg.model.vocab_size` was asked for, too, which Bridge would not have read."""
    problems = read(tmp_path, "tokenizer.use_tokenizer_vocab_size=True").problems
    assert [problem.where for problem in problems] == ["cfg.tokenizer.vocab_size"]


def test_in_process_restarts_are_refused_when_a_plan_is_made(tmp_path: Path) -> None:
    cfg = {**CONTAINER, "inprocess_restart": {"enabled": True}}
    (tmp_path / "cfg.yaml").write_text(write_yaml(cfg))
    problems = read_launch(["--bridge", str(tmp_path / "cfg.yaml")], gpus=8).problems
    assert [problem.where for problem in problems] == ["cfg.inprocess_restart.enabled"]


def adapted(folder: Path, **fields: object) -> Reading:
    """As Bridge writes them: their empty set of names ended in "could not determine a constructor"."""
    text = write_yaml({**CONTAINER, "peft": {"_target_": "megatron.bridge.peft.lora.LoRA", "dim": 8, **fields}})
    (folder / "cfg.yaml").write_text(text.replace("  dim: 8", "  dim: 8\n  params_to_save: !!set {}"))
    return read_launch(["--bridge", str(folder / "cfg.yaml")], gpus=8)


def test_adapters_in_a_file(tmp_path: Path) -> None:
    reading = adapted(tmp_path, dropout=0.05, target_modules=["linear_fc1", "linear_qkv"])
    assert not reading.problems
    job = job_of(reading, "h100-80g")
    assert job.model.adapters == Adapters(rank=8, dropout=0.05, targets=("linear_qkv", "linear_fc1"))
    assert job.unavailable == ("userbuffers",)
    assert {fact.place: fact.origin for fact in reading.facts}["model.adapters.rank"] == "cfg.peft.dim"


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"_target_": "megatron.bridge.peft.dora.DoRA"}, "cfg.peft"),
        ({"target_modules": ["*.layers.0.*.linear_qkv"]}, "cfg.peft.target_modules"),
        ({"target_modules": []}, "cfg.peft.target_modules"),
        ({"a2a_experimental": True}, "cfg.peft.a2a_experimental"),
        ({"dropout": 0.1, "dropout_position": "post"}, "cfg.peft.dropout_position"),
    ],
)
def test_other_adapters_are_refused_by_name(fields: dict[str, object], place: str, tmp_path: Path) -> None:
    assert [problem.where for problem in adapted(tmp_path, **fields).problems] == [place]


STACK = {
    "_target_": "megatron.bridge.models.hybrid.hybrid_provider.HybridModelProvider",
    "is_hybrid_model": True,
    "mamba_chunk_size": 128,
    "hybrid_override_pattern": None,
    "hybrid_stack_spec": {
        "_target_": "megatron.bridge.models.hybrid.hybrid_provider.get_default_hybrid_stack_spec",
        "_call_": False,
    },
}
OF_MAMBA = {"mamba_num_heads": 32, "mamba_head_dim": 64, "mamba_num_groups": 8, "mamba_state_dim": 128}


def stack(folder: Path, pattern: str, **changes: object) -> Reading:
    model = {name: value for name, value in MODEL.items() if name != "transformer_layer_spec"}
    model |= {**STACK, "hybrid_layer_pattern": pattern, "num_layers": None} | changes
    (folder / "cfg.yaml").write_text(write_yaml({**CONTAINER, "model": model}))
    return read_launch(["--bridge", str(folder / "cfg.yaml")], gpus=8)


def test_a_hybrid_stack_that_is_a_gpt_is_the_same_job(tmp_path: Path) -> None:
    """As `HybridModelProvider` says it: two symbols are a layer, and stages are alike."""
    same = read(tmp_path, "model.pipeline_model_parallel_layout='Etttt|ttttL'")
    assert job_of(stack(tmp_path, "*-" * 8), "h100-80g") == job_of(same, "h100-80g")


OUTER = ("seq_length", "share_embeddings_and_output_weights", "position_embedding_type", "transformer_layer_spec", "vocab_size")


def as_builders_have_it(model: dict[str, Any], config: str) -> dict[str, Any]:
    """A provider's fields as 0.7 writes its model configurations: layers in a part of their own, with a builder's name."""
    inner = {name: value for name, value in model.items() if name not in OUTER and not name.startswith(("_", "hybrid"))}
    activation = {"activation_func": "silu", "_target_": "megatron.bridge.models.transformer_config.TransformerConfig"}
    outer = {name: value for name, value in model.items() if name not in inner}
    module, _, name = config.rpartition(".")
    builder = f"{module}.{name.replace('Config', 'Builder')}"
    return {**outer, "transformer": {**inner, **activation}, "_target_": config, "_builder_": builder, "logit_dtype": None}


@pytest.mark.parametrize("name", ["gpt.gpt_builder.GPTModelConfig", "gpt.model_config.BridgeGPTModelConfig"])
def test_a_configuration_of_0_7_is_the_same_job(name: str, tmp_path: Path) -> None:
    model = as_builders_have_it(MODEL, f"megatron.bridge.models.{name}")
    (tmp_path / "cfg.yaml").write_text(write_yaml({**CONTAINER, "model": model}))
    newer = read_launch(["--bridge", str(tmp_path / "cfg.yaml"), "model.num_layers=4"], gpus=8)
    assert newer.problems == ()
    assert job_of(newer, "h100-80g") == job_of(read(tmp_path, "model.num_layers=4"), "h100-80g")


def test_a_hybrid_configuration_of_0_7_is_the_same_job(tmp_path: Path) -> None:
    pattern = "M-M-M*-M-M-M*-M-"
    older = job_of(stack(tmp_path, pattern, **OF_MAMBA), "h100-80g")
    provider = {name: value for name, value in MODEL.items() if name != "transformer_layer_spec"}
    model = as_builders_have_it(
        {**provider, **STACK, **OF_MAMBA, "num_layers": None, "hybrid_layer_pattern": pattern},
        "megatron.bridge.models.hybrid.hybrid_builder.HybridModelConfig",
    )
    (tmp_path / "cfg.yaml").write_text(write_yaml({**CONTAINER, "model": model}))
    newer = read_launch(["--bridge", str(tmp_path / "cfg.yaml")], gpus=8)
    assert newer.problems == ()
    assert job_of(newer, "h100-80g") == older


@pytest.mark.parametrize("name", ["hybrid_layer_pattern", "hybrid_override_pattern"])
def test_a_hybrid_stack_of_0_5_is_read_as_0_6s_is(name: str, tmp_path: Path) -> None:
    """`MambaModelProvider`, with its pattern under either name."""
    pattern = "M-M-M*-M-M-M*-M-"
    newer = job_of(stack(tmp_path, pattern, **OF_MAMBA), "h100-80g")
    provider = "megatron.bridge.models.mamba.mamba_provider"
    of_0_5 = {
        "_target_": f"{provider}.MambaModelProvider",
        "mamba_stack_spec": {"_target_": f"{provider}.get_default_mamba_stack_spec", "_call_": False},
        "mamba_chunk_size": None,
        "hybrid_stack_spec": None,
        "hybrid_layer_pattern": None,
        name: pattern,
    }
    reading = stack(tmp_path, pattern, **OF_MAMBA, **of_0_5)
    assert reading.problems == ()
    assert job_of(reading, "h100-80g") == newer


def test_mamba_layers_of_a_hybrid_stack_are_read(tmp_path: Path) -> None:
    reading = stack(tmp_path, "M-M-M*-M-M-M*-M-", **OF_MAMBA)
    assert reading.problems == ()
    [mamba] = next(fact.value for fact in reading.facts if fact.place == "model.opaque" and fact.value[0]["kind"] == "mamba")[:1]
    assert mamba["layers"]
    assert mamba["mamba"] == {"heads": 32, "size": 64, "groups": 8, "state": 128}


def test_what_of_a_hybrid_stack_is_not_priced_is_named(tmp_path: Path) -> None:
    strange = {"mamba_chunk_size": 256, "hybrid_stack_spec": {"_target_": "mine.stack", "_call_": False}}
    wheres = sorted(problem.where for problem in stack(tmp_path, "M-M-M*-M-M-M*-M-", **OF_MAMBA, **strange).problems)
    assert wheres == ["cfg.model.hybrid_stack_spec", "cfg.model.mamba_chunk_size"]


def test_graphs_are_those_that_bridge_says_by_either_name(tmp_path: Path) -> None:
    """Recipes say the older one, beside the newer one's default, "full", which was read letter by letter."""
    graphs = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": "full"}
    for scope, captured in ((["attn"], ["attn"]), (None, [])):
        (tmp_path / "cfg.yaml").write_text(write_yaml({**CONTAINER, "model": {**MODEL, **graphs, "cuda_graph_scope": scope}}))
        reading = read_launch(["--bridge", str(tmp_path / "cfg.yaml")], gpus=8)
        said = str([fact for fact in reading.facts if "captured" in fact.place]) + str(reading)
        assert ("'attn'" in said) == bool(captured)
        assert "transformer_engine with f" not in said


@pytest.mark.parametrize("setting", ["enable_in_batch_packing", "packed_sequence_specs"])
def test_a_packed_data_set_is_told(setting: str, tmp_path: Path) -> None:
    """Its plan says what attention takes, and keeps what turns queries and keys where that asks the host for lengths."""
    dataset = {"seq_length": 2048, setting: {"packed_sequence_size": 2048} if setting.endswith("specs") else True}
    model = {**MODEL, "apply_rope_fusion": False}
    (tmp_path / "cfg.yaml").write_text(write_yaml({**CONTAINER, "model": model, "dataset": dataset}))
    reading = read_launch(["--bridge", str(tmp_path / "cfg.yaml")], gpus=8)
    assert {fact.place: fact.origin for fact in reading.facts}["batch.packed"] == f"cfg.dataset.{setting}"
    assert job_of(reading, "h100-80g").rotary_asks_host
    assert not job_of(read(tmp_path), "h100-80g").batch.is_packed


def test_layers_of_another_model_are_refused(tmp_path: Path) -> None:
    model = {**MODEL, "_target_": "megatron.bridge.models.t5_provider.T5ModelProvider", "vision_config": {"depth": 2}}
    (tmp_path / "cfg.yaml").write_text(write_yaml({**CONTAINER, "model": model}))
    problems = read_launch(["--bridge", str(tmp_path / "cfg.yaml")], gpus=8).problems
    assert {problem.where for problem in problems} == {"cfg.model", "cfg.model.vision_config"}


def test_a_plan_for_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_recipes.py").write_text(
        "from pathlib import Path\nfrom types import SimpleNamespace\nimport torch.nn.functional as F\nimport yaml\n"
        "def small():\n"
        "    print('a word of a framework')\n"
        f"    parts = yaml.safe_load(Path({written(tmp_path)!r}).read_text())\n"
        "    cfg = SimpleNamespace(**{n: SimpleNamespace(**p) if isinstance(p, dict) else p for n, p in parts.items()})\n"
        "    cfg.model.activation_func, cfg.model.recompute_granularity = F.silu, 'selective'\n"
        "    return cfg\n"
        "def lacking():\n"
        "    try:\n"
        "        import a_package_nobody_has.inner\n"
        "    except ImportError as error:\n"
        "        raise RuntimeError('no pipeline') from error\n"
        "def asking():\n"
        "    import os\n"
        "    raise OSError('no connection to https://huggingface.co: offline ' + os.environ['HF_HUB_OFFLINE'])\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    plan = ("plan", "--cluster", "h100-80g", "--gpus", 8, "-o", "plan.yaml")
    result = lynx(*plan, "--bridge", "my_recipes:small", "--", "model.seq_length=1024")
    assert result.exit_code == 0, result.output
    last = result.stdout.splitlines()[-1]
    assert "torchrun ... -m megatron_lynx.launch --lynx-host bridge SCRIPT --lynx-plan plan.yaml" in last
    assert last.endswith("and drop cfg.model.recompute_granularity")
    assert "a word of a framework" not in result.stdout
    result = lynx(*plan, "--bridge", "my_recipes:lacking")
    assert result.exit_code == 2
    assert "ModuleNotFoundError: No module named 'a_package_nobody_has" in " ".join(result.output.split())
    result = lynx(*plan, "--bridge", "my_recipes:asking")
    assert result.exit_code == 2
    assert "without a network" in " ".join(result.output.split())
    assert "offline 1" in result.output
    assert "Traceback" not in result.output
    for name, found in {"my_recipes:none": "AttributeError", "nowhere_at_all:x": "ModuleNotFoundError", "plain": "plain"}.items():
        result = lynx(*plan, "--bridge", name)
        assert (result.exit_code, found in result.output) == (2, True), result.output
    sys.modules.pop("my_recipes", None)


def test_a_class_of_ones_own_is_told_by_what_it_builds() -> None:
    from megatron_lynx.launch_arguments.container import _other_class

    class GPTModelProvider:
        def provide(self) -> None: ...

    class Mine(GPTModelProvider):
        pass

    class Vision(GPTModelProvider):
        def provide(self) -> None: ...

    assert _other_class(Mine()) is None
    assert _other_class(Vision()) == "Vision"
    assert _other_class(SimpleNamespace()) is None


def test_neighbours_are_named_in_bridges_settings(tmp_path: Path) -> None:
    """And a launch line sets them; the number of chunks, where Megatron-LM's flag says layers of a chunk."""
    asked = ("advise", "--cluster", "h100-80g", "--gpus", 8, "--json", "--bridge", written(tmp_path), "--")
    alone = ("model.tensor_model_parallel_size=1", "model.sequence_parallel=False", "model.seq_length=1024")
    result = lynx(*asked, *alone, "model.virtual_pipeline_model_parallel_size=2")
    assert result.exit_code == 0, result.output
    near = json.loads(result.stdout)["neighbours"]
    assert near
    for each in near:
        said, _, dropped = each["flags"].partition(" without ")
        settings = said.split()
        assert settings
        assert not dropped or each["launch"].endswith(f", and drop {dropped}")
        assert all(re.fullmatch(r"cfg\.(model|train)\.\w+=\w+", word) for word in settings)
        assert "-m megatron_lynx.launch --lynx-host bridge SCRIPT --lynx-plan plan.yaml, set " in each["launch"]
        assert all(word in each["launch"] for word in settings)
    chunks = "cfg.model.virtual_pipeline_model_parallel_size"
    assert any(f"{chunks}=4" in each["flags"] for each in near)  # of one layer each
    assert not any(f"{chunks}=" in each["launch"] and "drop" in each["launch"] for each in near)


def test_flags_become_assignments(tmp_path: Path) -> None:
    container = read(tmp_path).container
    assert container is not None
    flags = ["--micro-batch-size 2", "--sequence-parallel", "--no-rope-fusion", "--lynx-check 2"]
    said = [container.setting(flag) for flag in [*flags, "--pipeline-model-parallel-layout 'Et*3|t*5L'"]]
    assert said == [
        "cfg.train.micro_batch_size=2",
        "cfg.model.sequence_parallel=True",
        "cfg.model.apply_rope_fusion=False",
        "--lynx-check 2",
        "cfg.model.pipeline_model_parallel_layout='Et*3|t*5L'",
    ]


def test_a_search_for_a_container(tmp_path: Path) -> None:
    asked = ("search", "--cluster", "h100-80g", "--gpus", 4, "--policies", "none,full", "--top", 2, "--json")
    found = lynx(*asked, "--bridge", written(tmp_path), "--", "model.seq_length=1024")
    flags = FLAGS.replace("--seq-length 2048", "--seq-length 1024").split()
    said = lynx(*asked, "--", *flags)
    assert found.exit_code == said.exit_code == 0, found.output
    assert json.loads(found.stdout)["candidates"] == json.loads(said.stdout)["candidates"]
