"""What is read of 25 launches that others have published. They are not part of this repository: their folder is beside it, or is
named by `LAUNCHES_DIR`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_lynx.advise.today import asked_launch
from megatron_lynx.config.job import Job
from megatron_lynx.errors import ConfigError
from megatron_lynx.launch_arguments.command_line import read_launch_file

FOLDER = Path(os.environ.get("LAUNCHES_DIR", Path(__file__).parents[3] / "shared/launches"))
READ = {
    "apertus-70b-4096gh200": "80 x 8192, t4 c1 p8x5 e1, 1 of 4096 x 4096, bf16, -; stock none",
    "deepseek-v3-256b200-mxfp8-deepep": "61 x 7168, t1 c1 p8x2 e32, 1 of 8192 x 4096, mxfp8, 8 of 256 deepep latent mtp; "
    "stock mlp + mla_up_proj",
    "deepseek-v3-256gb200-mxfp8-guide": "61 x 7168, t1 c1 p8x4 e32, 1 of 2048 x 4096, mxfp8, 8 of 256 hybridep latent; "
    "stock mlp + moe_act, graphs",
    "deepseek-v3-256h100-4k-optoffload": "61 x 7168, t1 c1 p8x4 e32, 1 of 8192 x 4096, blockwise, 8 of 256 deepep latent mtp; "
    "stock layernorm + mlp + moe + mla_up_proj",
    "deepseek-v3-proxy-64h100-release": "14 x 7168, t2 c1 p4x2 e16, 1 of 512 x 4096, bf16, 8 of 64 hybridep latent mtp; "
    "stock none",
    "gpt-oss-20b-8h100-example": "12 x 512, t1 c1 p8x1 e1, 1 of 128 x 8192, delayed, 2 of 4 alltoall; stock selective",
    "gpt3-15b-64h100-release": "32 x 6144, t8 c1 p1x1 e1, 4 of 1152 x 4096, bf16, -; stock none",
    "gpt3-175b-example": "96 x 12288, t8 c1 p16x1 e1, 1 of 1536 x 2048, bf16, -; stock none",
    "llama3-70b-64b200-bf16-bridge": "80 x 8192, t2 c2 p4x5 e1, 1 of 256 x 8192, bf16, -; stock none, graphs",
    "llama3-70b-64b200-mxfp8-bridge": "80 x 8192, t2 c1 p4x5 e1, 1 of 256 x 8192, mxfp8, -; stock none",
    "llama3-70b-64h100-fp8cs-bridge": "80 x 8192, t4 c1 p8x5 e1, 1 of 256 x 8192, tensorwise, -; stock none",
    "llama3-8b-8h100-bf16-example": "32 x 4096, t1 c1 p1x1 e1, 1 of 128 x 8192, bf16, -; stock none",
    "llama3-8b-8h100-fp8-example": "32 x 4096, t1 c1 p1x1 e1, 1 of 128 x 8192, delayed, -; stock none",
    "llama3-8b-8h100-mfsdp-fp8-example": "--use-megatron-fsdp",
    "llmjp-v4-291b-a27b-288b200": "70 x 5120, t1 c1 p6x2 e8, 2 of 2880 x 4096, bf16, 8 of 128 alltoall; stock moe",
    "llmjp-v4-32b-dense-h200": "64 x 5120, t4 c1 p1x1 e1, 2 of 512 x 4096, bf16, -; stock none",
    "mixtral-8x22b-128h100-bf16": "56 x 6144, t2 c1 p8x7 e8, 1 of 256 x 4096, bf16, 2 of 8 alltoall; stock none",
    "mixtral-8x22b-128h100-fp8block": "56 x 6144, t2 c1 p8x7 e8, 1 of 256 x 4096, blockwise, 2 of 8 alltoall; stock none",
    "qwen3-235b-256h100-bf16-a2a": "94 x 4096, t2 c1 p8x4 e32, 1 of 2048 x 4096, bf16, 8 of 128 deepep overlapped; "
    "stock layernorm + moe_act, exchanges overlapped, weight gradients delayed",
    "qwen3-30b-32h100-bf16-fullrec": "48 x 2048, t1 c1 p1x1 e8, 4 of 256 x 4096, bf16, 8 of 128 deepep; stock full",
    "qwen3-30b-32h100-bf16": "48 x 2048, t1 c1 p1x1 e8, 1 of 256 x 4096, bf16, 8 of 128 deepep; stock none",
    "qwen3-next-80b-128h100-bf16": "48 x 2048, t1 c1 p4x3 e32, 1 of 256 x 4096, bf16, 10 of 512 deepep mtp "
    "36 gated_delta_net 12 gated_attention; "
    "stock layernorm + moe_act + shared_experts",
    "rl-glm4.7-355b-64h100-megatron": "92 x 5120, t8 c2 p4x1 e16, 1 of 256 x 32768, bf16, 8 of 160 deepep; stock full",
    "rl-qwen3-30b-8h100-megatron": "48 x 2048, t4 c1 p1x1 e8, 1 of 256 x 20480, bf16, 8 of 128 alltoall; stock full",
    "rl-qwen3-30b-8h100-slime": "48 x 2048, t4 c1 p1x1 e8, 1 of 256 x 20480, bf16, 8 of 128 alltoall; stock full",
}
"""Layers x width, layout with chunks, micro-batch of batch x sequence, precision, experts, what else; and what is recomputed
today. Of what is refused, why. Held against the sources' own words (`# uses` in the files), not against what is read."""


@pytest.mark.parametrize("name", READ)
def test_what_is_read(name: str) -> None:
    if not FOLDER.is_dir():
        pytest.skip("needs the folder of public launches, in LAUNCHES_DIR")
    assert read(FOLDER / f"{name}.args") == READ[name]


def read(path: Path) -> str:
    file = read_launch_file(path)
    try:
        asked = asked_launch(file.words, file.cluster or "h100-80g")
    except ConfigError as error:
        return " ".join(problem.where for problem in error.problems)
    return f"{said_of(asked.job)}; {asked.reading.today.name}"


def said_of(job: Job) -> str:
    model, layout, experts = job.model, job.parallel, job.model.experts
    others = [
        "" if experts is None else f"{experts.per_token} of {experts.count} {experts.dispatcher}",
        "overlapped" if model.moe_overlapped else "",
        "latent" if model.latent else "",
        "mtp" if model.mtp else "",
        *(f"{len(each.numbers(model.layers))} {each.kind}" for each in model.opaque),
    ]
    return ", ".join(
        (
            f"{model.layers} x {model.hidden}",
            f"t{layout.tensor} c{layout.context} p{layout.pipeline}x{job.chunks} e{layout.expert}",
            f"{job.batch.micro} of {job.batch.global_} x {model.seq}",
            str(model.fp8_recipe or model.dtype),
            " ".join(filter(None, others)) or "-",
        )
    )
