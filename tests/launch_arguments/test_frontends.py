"""Launches of ms-swift, verl, NeMo-RL and slime, and shapes of a Hugging Face config.json."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron_lynx.cost.parameters import stage_parameters
from megatron_lynx.errors import ConfigError
from megatron_lynx.launch_arguments import Reading, job_of, read_launch
from megatron_lynx.launch_arguments.hf_config import shapes_in
from megatron_lynx.launch_arguments.reading import unknown_in_words
from megatron_lynx.stock.legality import Facts, offered
from megatron_lynx.stock.setting import StockSetting
from tests.test_cli import lynx

DENSE = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 1000000,
}
MIXTURE = {
    **DENSE,
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
DEEPSEEK = {
    **DENSE,
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
GPT_OSS = {
    **DENSE,
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}

SWIFT = (
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-8B --dataset some/set "
    "--packing true --max_length 8192 --micro_batch_size 1 --global_batch_size 16 --sequence_parallel true --lr 1e-5 "
    "--recompute_granularity full --recompute_method uniform --recompute_num_layers 1"
)
WHOLE = ("recompute_granularity=full", "recompute_method=uniform", "recompute_num_layers=1")
ACTOR = "actor_rollout_ref.actor"
VERL = (
    "python3 -m verl.trainer.main_ppo model_engine=megatron data.max_prompt_length=2048 data.max_response_length=8192 "
    f"actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B-Base {ACTOR}.ppo_mini_batch_size=16 {ACTOR}.use_dynamic_bsz=True "
    f"{ACTOR}.ppo_max_token_len_per_gpu=30720 {ACTOR}.megatron.tensor_model_parallel_size=4 trainer.nnodes=1 "
    f"{ACTOR}.megatron.pipeline_model_parallel_size=2 {ACTOR}.megatron.virtual_pipeline_model_parallel_size=2 "
    f"{ACTOR}.megatron.expert_model_parallel_size=2 {ACTOR}.megatron.expert_tensor_parallel_size=1 "
    "actor_rollout_ref.rollout.n=8 trainer.n_gpus_per_node=8 "
    + " ".join(
        f"+{ACTOR}.megatron.override_transformer_config.{setting}"
        for setting in (
            "recompute_granularity=full",
            "recompute_method=uniform",
            "recompute_num_layers=1",
            "apply_rope_fusion=True",
        )
    )
)
PARENT = """\
policy:
  model_name: Qwen/Qwen3-30B-A3B
  precision: bfloat16
  train_global_batch_size: 512
  train_micro_batch_size: 4
  max_total_sequence_length: 512
  sequence_packing:
    enabled: true
    train_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}
  megatron_cfg:
    enabled: true
    activation_checkpointing: false
    recompute_granularity: full
    tensor_model_parallel_size: 1
    pipeline_model_parallel_size: 1
    context_parallel_size: 1
    expert_tensor_parallel_size: 1
    expert_model_parallel_size: 1
    pipeline_dtype: ${policy.precision}
    sequence_parallel: false
    moe_token_dispatcher_type: alltoall
    fp8_cfg: {enabled: false, fp8: e4m3, fp8_recipe: blockwise}
    optimizer: {optimizer: adam, use_distributed_optimizer: true, use_precision_aware_optimizer: true}
    distributed_data_parallel_config: {grad_reduce_in_fp32: false, overlap_grad_reduce: true}
cluster: {gpus_per_node: 8, num_nodes: 1}
"""
CHILD = """\
defaults: parent.yaml
policy:
  train_micro_batch_size: 1
  max_total_sequence_length: 4096
  megatron_cfg: {tensor_model_parallel_size: 2, expert_model_parallel_size: 8, sequence_parallel: true}
cluster: {num_nodes: 2}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "parent.yaml").write_text(PARENT)
    (tmp_path / "child.yaml").write_text(CHILD)
    for name, config in {"dense": DENSE, "mixture": MIXTURE, "deepseek": DEEPSEEK, "gpt_oss": GPT_OSS}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return tmp_path


def read(words: str, shapes: Path | None, **options: Any) -> Reading:
    return read_launch([*([] if shapes is None else ["--hf-config", str(shapes)]), *shlex.split(words)], **options)


def facts(reading: Reading) -> dict[str, Any]:
    assert reading.problems == ()
    return {fact.place: fact.value for fact in reading.facts}


def test_ms_swift_is_read_as_the_flags_it_stands_for(folder: Path) -> None:
    reading = read(f"{SWIFT} --tensor_model_parallel_size 2", folder / "dense")
    found = facts(reading)
    assert (found["gpus"], found["parallel.tensor"], found["parallel.sequence_parallel"]) == (8, 2, True)
    assert (found["model.layers"], found["model.kv_groups"], found["model.qk_norm"]) == (36, 8, True)
    assert (found["model.seq"], found["batch.micro"], found["batch.global"]) == (8192, 1, 16)
    assert (found["optimizer.gradients"], found["model.vocab"]) == ("fp32", 151936)
    assert reading.today.name == "stock full"
    assert reading.given.unknown == ()
    assert job_of(reading, "h100-80g").model.ffn == 12288


def test_ms_swift_recomputes_core_attention_unless_told(folder: Path) -> None:
    today = read(SWIFT.partition(" --recompute")[0], folder / "dense").today
    assert today.setting.recompute == ("core_attn",)


def test_preferences_have_two_sequences_a_sample(folder: Path) -> None:
    found = facts(read(SWIFT.replace("megatron sft", "megatron rlhf --rlhf_type dpo"), folder / "dense"))
    assert (found["batch.micro"], found["batch.global"]) == (2, 32)


def test_ms_swift_reads_a_file_of_options(folder: Path) -> None:
    file = folder / "sft.yaml"
    file.write_text(
        "ENV: {NPROC_PER_NODE: 4}\nmodel: Qwen/Qwen3-8B\nmax_length: 2048\nmicro_batch_size: 2\nglobal_batch_size: 16\n"
    )
    found = facts(read(f"megatron sft {file} --max_length 4096", folder / "dense"))
    assert (found["gpus"], found["model.seq"], found["batch.micro"]) == (4, 4096, 2)


def test_verl_packs_tokens(folder: Path) -> None:
    reading = read(VERL, folder / "mixture")
    found = facts(reading)
    assert (found["gpus"], found["parallel.tensor"], found["parallel.pipeline"], found["parallel.expert"]) == (8, 4, 2, 2)
    assert (found["model.seq"], found["batch.micro"]) == (30720, 1)
    assert found["batch.global"] == 43, "16 x 8 samples of at most 10,240 tokens, three to a micro-batch"
    assert found["model.experts.ffn"] == 768
    assert (reading.today.name, reading.given.unknown) == ("stock full", ())


def test_supervised_verl_is_read_by_its_own_keys(folder: Path) -> None:
    words = (
        "torchrun --nproc_per_node 8 -m verl.trainer.sft_trainer engine=megatron optim=megatron model.path=some/model "
        "data.train_batch_size=96 data.max_length=2048 data.use_dynamic_bsz=False data.micro_batch_size_per_gpu=2 "
        "engine.tensor_model_parallel_size=2 engine.override_transformer_config.recompute_granularity=null"
    )
    reading = read(words, folder / "dense")
    found = facts(reading)
    assert (found["gpus"], found["parallel.tensor"], found["model.seq"]) == (8, 2, 2048)
    assert (found["batch.micro"], found["batch.global"]) == (2, 96)
    assert "needed megatron" in str(read(words.replace("engine=megatron", "engine=fsdp"), folder / "dense").problems[0])


def test_nemo_rl_inherits_and_refers(folder: Path) -> None:
    words = f"uv run examples/run_grpo.py --config {folder / 'child.yaml'} policy.megatron_cfg.activation_checkpointing=true"
    reading = read(words, folder / "mixture")
    found = facts(reading)
    assert (found["gpus"], found["parallel.tensor"], found["parallel.expert"]) == (16, 2, 8)
    assert (found["model.seq"], found["batch.micro"], found["batch.global"]) == (4096, 1, 512)
    assert (found["model.dtype"], found["optimizer.gradients"]) == ("bf16", "bf16")
    assert "model.fp8.format" not in found
    assert (reading.today.name, reading.given.unknown) == ("stock full", ())
    assert read(words.replace("=true", "=false"), folder / "mixture").today.name == "stock none"


def test_slime_says_its_gpus_itself() -> None:
    words = (
        "ray job submit --address=http://127.0.0.1:8265 -- python3 train.py --actor-num-nodes 2 --actor-num-gpus-per-node 8 "
        "--num-layers 36 --hidden-size 4096 --num-attention-heads 32 --vocab-size 151936 --max-tokens-per-gpu 9216 "
        "--global-batch-size 256 --tensor-model-parallel-size 2 --sequence-parallel --swiglu --disable-bias-linear"
    )
    found = facts(read(words, None))
    assert (found["gpus"], found["model.seq"], found["parallel.tensor"]) == (16, 9216, 2)


def test_shapes_fill_in_what_a_launch_of_megatron_leaves_out(folder: Path) -> None:
    words = "pretrain_gpt.py --bf16 --seq-length 4096 --micro-batch-size 1 --num-layers 4"
    found = facts(read(words, folder / "dense", gpus=8))
    assert (found["model.layers"], found["model.hidden"], found["model.norm"]) == (4, 4096, "rmsnorm")


def test_shapes_of_latent_attention_and_its_experts(folder: Path) -> None:
    words = "pretrain_gpt.py --bf16 --seq-length 4096 --micro-batch-size 1 --pipeline-model-parallel-size 61"
    found = facts(read(words, folder / "deepseek", gpus=61))
    assert (found["model.latent.kv_rank"], found["model.latent.rope_size"], found["model.latent.q_rank"]) == (512, 64, 1536)
    assert (found["model.experts.count"], found["model.experts.ffn"], found["model.experts.shared_ffn"]) == (256, 2048, 2048)
    assert found["model.experts.layers"] == ["4-61"]


def test_shapes_of_windows_and_sinks(folder: Path) -> None:
    found = facts(read("pretrain_gpt.py --bf16 --seq-length 4096 --micro-batch-size 1", folder / "gpt_oss", gpus=8))
    assert (found["model.window.keys"], found["model.window.share"], found["model.sinks"]) == (128, 0.5, True)
    assert (found["model.activation"], found["model.bias"]) == ("quick_geglu", True)


def test_adapters_of_verl_and_nemo_rl(folder: Path) -> None:
    dense = " ".join(word for word in VERL.split() if ".expert_" not in word)
    lora = "actor_rollout_ref.model.lora"
    found = facts(read(f"{dense} {lora}.rank=16 {lora}.target_modules=[linear_qkv,linear_proj]", folder / "dense"))
    assert found["model.adapters.rank"] == 16
    assert found["model.adapters.targets"] == ["linear_qkv", "linear_proj"]
    assert found["unavailable"] == ["overlap", "userbuffers"]
    assert "model.adapters.rank" not in facts(read(f"{dense} {lora}.rank=0", folder / "dense"))
    peft = "policy.megatron_cfg.peft"
    words = f"uv run run_sft.py --config {folder / 'parent.yaml'} {peft}.enabled=true {peft}.dim=8 {peft}.dropout_position=post"
    found = facts(read(f"{words} {peft}.target_modules=[linear_fc1] {peft}.lora_dtype=None", folder / "dense"))
    assert (found["model.adapters.rank"], found["model.adapters.targets"]) == (8, ["linear_fc1"])
    [problem] = read(f"{words} {peft}.target_modules=[]", folder / "dense").problems
    assert problem.where == f"{peft}.target_modules"


def test_adapters_of_ms_swift_are_priced_and_no_plan_is_made(folder: Path) -> None:
    """Each tensor-parallel rank has the whole first weight of a column-parallel linear's adapter, and the second of others'."""
    words = f"{SWIFT} --tuner_type lora --lora_rank 16 --target_modules all-linear --tensor_model_parallel_size 2"
    reading = read(words, folder / "dense", planning=False)
    found = facts(reading)
    adapters = {name.rpartition(".")[2]: value for name, value in found.items() if name.startswith("model.adapters")}
    linears = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    assert adapters == {"rank": 16, "targets": linears, "dropout": 0.05, "whole": True}
    assert "--lora_rank" not in " ".join(key for keys in reading.no_matter.values() for key in keys)
    sizes = (4096 + 6144 // 2) + (4096 // 2 + 4096) + (4096 + 24576 // 2) + (12288 // 2 + 4096)
    assert stage_parameters(job_of(reading, "h100-80g"), 0).matrices == 36 * 16 * sizes
    [problem] = read(words, folder / "dense").problems
    assert str(problem).startswith("--tuner_type: found lora, needed full under a plan")
    done = lynx("estimate", "--cluster", "h100-80g", "--hf-config", folder / "dense", "--", *shlex.split(words))
    assert done.exit_code == 0, done.stderr


GRPO = SWIFT.replace("megatron sft", "megatron rlhf --rlhf_type grpo")
SLIME = (
    "python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --num-layers 36 --hidden-size 4096 "
    "--num-attention-heads 32 --vocab-size 151936 --max-tokens-per-gpu 8192 --global-batch-size 256 --swiglu "
    "--disable-bias-linear"
)
NEMO = "uv run run_grpo.py --config {} policy.megatron_cfg.tensor_model_parallel_size=2"
DEFERRED = f"{NEMO} policy.megatron_cfg.defer_fp32_logits=true policy.logprob_chunk_size=256"
LOSSES = {
    "verl": (VERL, "mixture", (8, 4, 0)),
    "verl with entropy": (f"{VERL} {ACTOR}.entropy_coeff=0.001", "mixture", (12, 12, 0)),
    "ms-swift, GRPO": (GRPO, "dense", (12, 4, 0)),
    "ms-swift, GRPO, TP2": (f"{GRPO} --tensor_model_parallel_size 2 --log_entropy true", "dense", (20, 8, 0)),
    "ms-swift, DPO, whose loss is Megatron's": (GRPO.replace("grpo", "dpo"), "dense", None),
    "slime": (SLIME, None, (8, 4, 0)),
    "slime with entropy": (f"{SLIME} --entropy-coef 0.01", None, (12, 8, 0)),
    "slime, recomputed": (
        f"{SLIME} --entropy-coef 0.01 --rollout-temperature 0.8 --recompute-loss-function",
        None,
        (16, 4, 0),
    ),
    "NeMo-RL": (NEMO, "dense", (12, 4, 0)),
    "NeMo-RL in chunks": (DEFERRED, "dense", (4 + 32 / 8, 2, 0)),
    "NeMo-RL, fused": (f"{NEMO} policy.megatron_cfg.use_fused_linear_logprobs=true", "dense", (26 / 8, 0, 17)),
}


@pytest.mark.parametrize(("words", "shapes", "expected"), LOSSES.values(), ids=LOSSES)
def test_losses_on_logits_have_their_bytes(
    folder: Path, words: str, shapes: str | None, expected: tuple[float, ...] | None
) -> None:
    reading = read(words.format(folder / "parent.yaml"), None if shapes is None else folder / shapes)
    found = facts(reading)
    names = [f"model.log_probabilities.{name}_bytes" for name in ("peak", "saved", "weight")]
    assert [found.get(name) for name in names] == [*(expected or [None] * 3)]
    assert (reading.learns, reading.given.unknown) == (False, ())
    own = " ".join(key for keys in reading.no_matter.values() for key in keys)
    assert "entropy_coeff" not in own, "it was read"
    pieces = expected is None or words.startswith((VERL, SLIME))
    assert ("head" in found.get("unavailable", [])) != pieces


REFUSED = {
    "another type": ({**DENSE, "model_type": "qwen33"}, "model_type: found qwen33", "did you mean qwen3?"),
    "no type": ({}, "model_type: found None", "give its shapes as Megatron's flags"),
    "a missing key": ({**DENSE, "hidden_size": None}, "hidden_size: found nothing, needed this key", ""),
    "a word for a number": ({**DENSE, "num_hidden_layers": "36"}, "num_hidden_layers: found '36', needed a whole number", ""),
    "another activation": ({**DENSE, "hidden_act": "gelu"}, "hidden_act: found gelu, needed silu", ""),
}


@pytest.mark.parametrize(("config", "found", "todo"), REFUSED.values(), ids=REFUSED)
def test_shapes_that_are_not_known(tmp_path: Path, config: dict[str, Any], found: str, todo: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as refused:
        shapes_in(tmp_path)
    assert found in str(refused.value)
    assert todo in str(refused.value)


MISTAKES = {
    "adapters": (f"{SWIFT} --tuner_type lora_llm", "--tuner_type: found lora_llm, needed full or lora"),
    "another command": (SWIFT.replace("megatron sft", "megatron sfft"), "needed megatron pt, sft or rlhf; did you mean sft?"),
    "no length": (SWIFT.replace("--max_length 8192", ""), "--max_length: found nothing, needed a whole number"),
    "a shell's variable": (
        VERL.replace("n=8 t", "n=${rollout_n} t"),
        "rollout.n: found ${rollout_n}, needed a whole",
    ),
    "another engine": (
        VERL.replace("model_engine=megatron", "model_engine=veomni"),
        "model_engine: found veomni, needed megatron",
    ),
    "a stray word": (f"{VERL} and", "the word 'and', needed key=value"),
    "no file": ("run_grpo.py policy.precision=bfloat16", "--config: found nothing, needed NeMo-RL's YAML file"),
}


@pytest.mark.parametrize(("words", "found"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(folder: Path, words: str, found: str) -> None:
    try:
        said = "\n".join(map(str, read(words, folder / "mixture").problems))
    except ConfigError as refused:
        said = str(refused)
    assert found in said
    assert "needed this flag" not in said, "it follows from the mistake"


def test_a_launch_without_shapes_says_how_to_give_them() -> None:
    [problem] = read(SWIFT, None).problems
    assert str(problem) == (
        "--hf-config: found nothing, needed the config.json of Qwen/Qwen3-8B: no hub is asked here; "
        "--hf-config PATH, a file or its folder"
    )


def test_a_local_model_has_its_own_shapes(folder: Path) -> None:
    assert facts(read(SWIFT.replace("Qwen/Qwen3-8B", str(folder / "dense")), None))["model.hidden"] == 4096


def test_what_was_not_read_is_listed(folder: Path) -> None:
    (folder / "dense" / "config.json").write_text(json.dumps({**DENSE, "new_norm": True}))
    said = unknown_in_words(read(f"{SWIFT} --quantum true", folder / "dense"))
    assert said == "not read, and not counted: --quantum, config.json: new_norm"


def test_what_a_frontend_has_no_code_for_is_not_recommended(folder: Path) -> None:
    job = job_of(read(VERL, folder / "mixture"), "h100-80g", {"batch.global": 8})
    assert not offered(StockSetting(overlap=True), Facts.of(job))
    assert not offered(StockSetting(userbuffers=True), Facts.of(job))
    assert offered(StockSetting(overlap=True), Facts.of(job.model_copy(update={"unavailable": ()})))


def test_the_launch_under_a_plan_is_said_in_the_frontends_words(folder: Path) -> None:
    flags = ["--pipeline-model-parallel-layout 'Et|tL'", "--no-rope-fusion"]
    swift = read(SWIFT, folder / "dense").under_plan("p.yaml", flags)
    assert "LYNX_PLAN=p.yaml" in swift
    assert "--bridge_backend megatron-bridge --external_plugins lynx_swift.py --callbacks lynx" in swift
    assert "--recompute_granularity none" in swift
    assert "drop --recompute_method --recompute_num_layers" in swift
    verl = read(VERL, folder / "mixture").under_plan("p.yaml", [*flags, "--micro-batch-size 2"])
    override = f"{ACTOR}.megatron.override_transformer_config"
    assert f"+{override}.pipeline_model_parallel_layout='Et|tL'" in verl
    assert f"{override}.apply_rope_fusion=false" in verl
    assert f"drop {override}.recompute_granularity" in verl


def test_advise_reads_a_frontend(folder: Path) -> None:
    words = [*shlex.split(SWIFT), "--tensor_model_parallel_size", "8"]
    done = lynx("advise", "--cluster", "h100-80g", "--hf-config", folder / "dense", "--", *words)
    assert done.exit_code == 0, done.stderr
    assert "--recompute_granularity" in done.stdout
    assert "loss of this trainer" not in done.stderr
    words[words.index("sft") : words.index("sft") + 1] = ["rlhf", "--rlhf_type", "gkd"]
    done = lynx("estimate", "--cluster", "h100-80g", "--hf-config", folder / "dense", "--", *words)
    assert "warning: the loss of this trainer is not known" in done.stderr
