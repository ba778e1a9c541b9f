"""What is read of public launches in FP8 with experts: their own flags, as published, with what says nothing here left out."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lynx.errors import ConfigError

from .test_reading import SMALL, facts, job_of, problems, read

DEEPSEEK_V3 = (
    "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128 --seq-length 4096 "
    "--max-position-embeddings 4096 --position-embedding-type rope --make-vocab-size-divisible-by 3232 --vocab-size 129280 "
    "--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --multi-latent-attention "
    "--attention-dropout 0 --hidden-dropout 0 --qk-layernorm --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 "
    "--qk-pos-emb-head-dim 64 --v-head-dim 128 --num-experts 256 --moe-layer-freq ([0]*3+[1]*58) --moe-ffn-hidden-size 2048 "
    "--moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 --moe-grouped-gemm --moe-token-dispatcher-type flex "
    "--moe-flex-dispatcher-backend deepep --mtp-num-layers 1 --bf16 --use-distributed-optimizer --micro-batch-size 1 "
    "--global-batch-size 8192 --pipeline-model-parallel-size 8 --expert-model-parallel-size 32 --expert-tensor-parallel-size 1 "
)
MIXTRAL_8X22B = (
    "--num-layers 56 --hidden-size 6144 --ffn-hidden-size 16384 --num-attention-heads 48 --group-query-attention "
    "--num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 "
    "--hidden-dropout 0 --vocab-size 32000 --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall "
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 8 --expert-model-parallel-size 8 "
    "--expert-tensor-parallel-size 1 --num-virtual-stages-per-pipeline-rank 7 --bf16 --use-distributed-optimizer "
    "--micro-batch-size 1 --global-batch-size 256 "
)
LAUNCHES: dict[str, tuple[str, int, str, dict[str, Any]]] = {
    "DeepSeek-V3 on 256 H100": (
        f"{DEEPSEEK_V3} --pipeline-model-parallel-layout Et*2|(tt|)*22t|(tt|)*7mL --fp8-recipe blockwise --fp8-format e4m3 "
        "--moe-router-padding-for-fp8",
        256,
        "h100-80g",
        {"model.fp8.recipe": "blockwise", "model.fp8.format": "e4m3", "model.experts.filled": True, "model.mtp": 1},
    ),
    "DeepSeek-V3 on 256 B200": (
        f"{DEEPSEEK_V3} --pipeline-model-parallel-layout Et*4|(tttt|)*14tmL --fp8-recipe mxfp8 --fp8-format e4m3 "
        "--fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag --moe-router-padding-for-quantization",
        256,
        "b200-180g",
        {"model.fp8.recipe": "mxfp8", "model.fp8.parameters": True, "model.experts.filled": True, "model.latent.q_rank": 1536},
    ),
    "DeepSeek-V3 on 256 B200, NVFP4": (
        f"{DEEPSEEK_V3} --pipeline-model-parallel-layout Et*4|(tttt|)*14tmL --fp4-format e2m1 --fp4-recipe nvfp4 "
        "--first-last-layers-bf16 --num-layers-at-start-in-bf16 0 --num-layers-at-end-in-bf16 4 "
        "--moe-router-padding-for-quantization",
        256,
        "b200-180g",
        {"model.fp8.recipe": "nvfp4", "model.fp8.format": "e2m1", "model.fp8.last_in_bf16": 4, "model.experts.filled": True},
    ),
    "Mixtral 8x22B on 128 H100": (
        f"{MIXTRAL_8X22B} --fp8-recipe blockwise --fp8-format e4m3 --fp8-param-gather --moe-router-padding-for-fp8",
        128,
        "h100-80g",
        {"model.fp8.recipe": "blockwise", "model.fp8.parameters": True, "model.experts.filled": True, "parallel.expert": 8},
    ),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_what_is_read(name: str) -> None:
    words, gpus, cluster, expected = LAUNCHES[name]
    found = facts(words, gpus=gpus)
    assert {place: found[place] for place in expected} == expected
    assert problems(words, gpus=gpus) == ""
    job = job_of(read(words, gpus=gpus), cluster)
    assert job.model.experts is not None
    assert (job.model.fp8_recipe, job.model.experts.filled) == (expected["model.fp8.recipe"], True)


@pytest.mark.parametrize(
    ("flags", "cluster", "said"),
    [
        ("--fp4-format e2m1 --fp8-format e4m3", "b200-180g", "--fp8-format: found also --fp4-format, needed one of them"),
        ("--fp4-format e2m1 --fp4-recipe custom", "b200-180g", "--fp4-recipe: found custom, needed nvfp4"),
        ("--fp4-format e2m1 --fp4-quantizer-factory mine.of", "b200-180g", "what another quantizer saves is not known"),
        ("--fp4-format e2m1 --fp4-param-gather --use-distributed-optimizer", "b200-180g", "no run with weights in FP4 was tried"),
        ("--fp4-format e2m1", "h100-80g", "GPUs of cluster h100-80g take delayed, tensorwise, blockwise"),
        (
            "--fp4-format e2m1 --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap",
            "b200-180g",
            "such linears have",
        ),
    ],
)
def test_what_is_refused_of_fp4(flags: str, cluster: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        job_of(read(f"{SMALL} {flags}"), cluster)
    assert said in str(refused.value)


def test_rows_that_are_filled_up_are_no_matter_without_experts() -> None:
    said = f"{SMALL} --moe-router-padding-for-fp8"
    assert problems(said) == ""
    assert "model.experts.filled" not in facts(said)


@pytest.mark.parametrize(
    "graphs",
    [
        "--cuda-graph-impl full_iteration --te-rng-tracker",
        "--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router --cuda-graph-warmup-steps 0 --te-rng-tracker",
        "--cuda-graph-impl transformer_engine --cuda-graph-scope attn",
        "--external-cuda-graph --cuda-graph-scope attn --te-rng-tracker",
        "--enable-cuda-graph",
    ],
)
def test_graphs_are_what_a_launch_does_today(graphs: str) -> None:
    """No plan is beside them: its launch is printed without."""
    reading = read(f"{MIXTRAL_8X22B} {graphs}", gpus=128)
    assert reading.problems == ()
    assert reading.today.name == "stock none, graphs"
    assert set(reading.today.flags) == {word for word in graphs.split() if word.startswith("--")}
    assert not any("graph" in word or "rng" in word for word in reading.changed({}).arguments)
    assert all(flag in reading.under_plan("plan.yaml", []) for flag in reading.today.flags), "it says what is left out"
    without = read(f"{MIXTRAL_8X22B} --cuda-graph-impl none", gpus=128)
    assert (without.today.graphs, without.today.flags) == (False, ())
