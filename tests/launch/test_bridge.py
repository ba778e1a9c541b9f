"""Megatron-Bridge under plans, on CPU ranks. `make bridge` installs what it needs, beside this checkout, and runs these tests.

Needs BRIDGE_PYTHON, an interpreter with torch and what Bridge imports, and folders of unpacked releases in BRIDGE_0_6_DIR and
BRIDGE_0_5_DIR.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lynx.launch_arguments import job_of, read_launch
from megatron_lynx.plan import save_plan
from tests.instruments.script_device import MEMORY_BYTES
from tests.tiny_jobs import tiny_job
from tests.uniform import uniform_plan

from ..te_releases import folder_of
from ..test_cli import lynx
from .launched import MODEL, flags_of, plan_of, saved

HERE = Path(__file__).parent
LAUNCHER = ["-m", "tests.instruments", "--lynx-host", "bridge"]
TP2 = ["local", "model.tensor_model_parallel_size=2"]
FOUR = ["model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=2", "model.sequence_parallel=True"]
CHUNKS = ["model.pipeline_model_parallel_size=2", "model.virtual_pipeline_model_parallel_size=2"]
SIZE = {"hidden": 64, "ffn": 128, "seq": 64, "vocab": 512, "microbatches": 4, "micro": 1}
DROPOUT = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
OF_TE = {"dtype": "bf16", "implementation": "transformer_engine"}

pytestmark = pytest.mark.long


class Nursery:
    """Processes that have a release of Bridge imported, and fork ranks (`bridge_nursery`)."""

    def __init__(self) -> None:
        self._of_release: dict[str, subprocess.Popen[str]] = {}

    def run(self, release: str, python: str, environment: dict[str, str], request: dict[str, Any]) -> int:
        if release not in self._of_release:
            command = [python, "-m", "tests.launch.bridge_nursery"]
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
            self._of_release[release] = subprocess.Popen(command, env=environment, cwd=HERE.parents[1], **pipes)
        process = self._of_release[release]
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps(request), file=process.stdin, flush=True)
        return int(process.stdout.readline())

    def close(self) -> None:
        for process in self._of_release.values():
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


@pytest.fixture(scope="module", autouse=True)
def nursery() -> Iterator[None]:
    yield
    NURSERY.close()


NURSERY = Nursery()


def run(
    folder: Path,
    name: str,
    words: list[str],
    *,
    ranks: int = 2,
    release: str = "0.6",
    launcher=LAUNCHER,
    script: str = "bridge_tiny.py",
    as_users_do: bool = False,
    **env: str,
) -> tuple[int, str]:
    """The status of a run, and what was said; what every rank saw of its steps is in the folder, under the run's name.
    `as_users_do`: by torchrun, whose processes import Bridge each for itself."""
    python = os.environ.get("BRIDGE_PYTHON")
    if python is None:
        pytest.skip("no BRIDGE_PYTHON (`make bridge` installs one)")
    path = [folder_of("BRIDGE", release, "megatron/bridge"), folder_of("MEGATRON_CORE", "0.19", "megatron/training")]
    path += [folder_of("TRANSFORMER_ENGINE", "2.20", "transformer_engine"), HERE.parents[1]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(Path(entry).absolute()) for entry in path)}
    environment |= {"TESTBED_STAND_INS": "tests.instruments", "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    environment |= {"TORCHDYNAMO_DISABLE": "1"}
    own = {**env, "NAME": name, "SAID_IN": str(folder)}
    command = [*launcher, str(HERE / script), *words]
    said = folder / f"{name}.txt"
    if not as_users_do:
        request = {"words": command, "environment": own, "ranks": ranks, "said": str(said)}
        status = NURSERY.run(release, python, environment, request)
        return status, said.read_text()
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    pipes: Any = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    done = subprocess.run([*torchrun, *command], env=environment | own, check=False, **pipes)
    return done.returncode, done.stdout + done.stderr


def same(folder: Path, one: str, other: str, ranks: int, steps: int = 4) -> bool:
    """Losses, norms and weights of all ranks."""
    for rank in range(ranks):
        seen, expected = (torch.load(folder / f"{name}_{rank}.pt", weights_only=False) for name in (other, one))
        assert len(seen["steps"]) == len(expected["steps"]) == steps
        for (losses, norm), (wanted, wanted_norm) in zip(seen["steps"], expected["steps"], strict=True):
            if norm != wanted_norm or any(not torch.equal(losses[name], wanted[name]) for name in wanted):
                return False
        if not all(map(torch.equal, seen["weights"], expected["weights"])):
            return False
    return True


@pytest.mark.parametrize("release", ["0.6", "0.5"])
def test_local_layers_with_dropout(tmp_path, release):
    save_plan(uniform_plan(tiny_job("llama", tensor=2, **SIZE, **DROPOUT)), tmp_path / "plan.yaml")
    under = ["--lynx-plan", str(tmp_path / "plan.yaml"), "--lynx-check", "2", "--lynx-trace", str(tmp_path / "first.json")]
    assert run(tmp_path, "stock", TP2, release=release)[0] == 0
    status, said = run(tmp_path, "planned", [*TP2, *under], release=release, as_users_do=release == "0.6")
    assert status == 0, said[-3000:]
    assert same(tmp_path, "stock", "planned", 2)
    assert "checked 2 steps against stock without recomputation: in each, 8 losses and the gradients of 54 parameters" in said
    # 4 steps x 4 micro-batches x 4 layers x 2 halves; the first half of a backward has no window
    assert "rank 0 recomputed 128 layer halves: 112 inside windows, 16 on demand" in said
    env = {"UNDER": str(tmp_path / "plan.yaml"), "TRACE": str(tmp_path / "second.json")}
    status, said = run(tmp_path, "within", TP2, release=release, launcher=[], **env)
    assert status == 0, said[-3000:]
    assert same(tmp_path, "stock", "within", 2)
    assert "rank 0 recomputed 128 layer halves" in said
    for name in ("first", "second"):
        events = json.loads((tmp_path / f"{name}.json").read_text())["traceEvents"]
        ranks = [event["pid"] for event in events if event.get("cat") == "recompute"]
        assert ranks.count(0) == ranks.count(1) == 32, "of one step"


@pytest.mark.parametrize("release", ["0.6", "0.5"])
def test_after_megatron_lm_in_one_process(tmp_path, release):
    """Launches one after the other, under a plan each: nothing of one is there when the next begins."""
    job = tiny_job("llama", tensor=2, **SIZE, **DROPOUT)
    plans = {"lm": plan_of("tensor 2"), "second": uniform_plan(job), "third": uniform_plan(job, ("activation",))}
    paths = [str(saved(plan, tmp_path / f"{name}.yaml")) for name, plan in plans.items()]
    assert run(tmp_path, "stock", TP2, release=release)[0] == 0
    words = [*paths, *MODEL, *flags_of("tensor 2"), "--train-iters", "3"]
    status, said = run(tmp_path, "after", words, release=release, launcher=[], script="bridge_after.py")
    assert status == 0, said[-3000:]
    assert same(tmp_path, "stock", "second", 2)
    assert same(tmp_path, "stock", "third", 2)
    assert re.findall(r"left behind [^\[\n]*\[[^\]\n]*\]", said) == [
        line for line in (f"left behind {name}: []" for name in ("Megatron-LM", "the second", "the third")) for _ in range(2)
    ]
    assert re.findall(r"checked 2 steps|rank 0 recomputed \d+", said) == [
        part for halves in (96, 128, 64) for part in ("checked 2 steps", f"rank 0 recomputed {halves}")
    ]


def test_transformer_engines_layers_in_a_pipeline(tmp_path):
    job = tiny_job(
        "llama",
        tensor=2,
        pipeline=2,
        sequence_parallel=True,
        dtype="bf16",
        implementation="transformer_engine",
        **SIZE,
        **DROPOUT,
    )
    save_plan(uniform_plan(job, gather="once"), tmp_path / "plan.yaml")
    assert run(tmp_path, "stock", FOUR, ranks=4)[0] == 0
    status, said = run(tmp_path, "planned", [*FOUR, "--lynx-plan", str(tmp_path / "plan.yaml"), "--lynx-check", "2"], ranks=4)
    assert status == 0, said[-3000:]
    assert same(tmp_path, "stock", "planned", 4)


EXPERTS = [
    *("model.num_moe_experts=4", "model.moe_router_topk=2", "model.moe_ffn_hidden_size=128", "model.moe_grouped_gemm=True"),
    *("model.expert_model_parallel_size=2", "model.moe_token_dispatcher_type='alltoall'"),
    *("model.moe_router_load_balancing_type='aux_loss'", "model.moe_aux_loss_coeff=0.01"),
]
WITH_EXPERTS = {"experts": {"count": 4, "per_token": 2, "ffn": 128}, "expert": 2, "expert_tensor": 1, "replicas": 2, **OF_TE}
CUT = ["cut", "model.context_parallel_size=2", "model.cp_comm_type='all_gather'"]
GRAPHS = [
    *(
        "graphs",
        "model.tensor_model_parallel_size=2",
        "model.sequence_parallel=True",
        "model.cuda_graph_impl='transformer_engine'",
    ),
    *("model.cuda_graph_modules=['attn']", "model.cuda_graph_warmup_steps=1", "model.use_te_rng_tracker=True"),
    "rng.te_rng_tracker=True",
]
LAYOUTS: dict[str, tuple[int, list[str], dict[str, Any]]] = {
    "two chunks on each stage": (2, CHUNKS, {"pipeline": 2, "layers_per_chunk": 1, **OF_TE}),
    "sequences cut among ranks": (2, ["local", *CUT], {"context": 2, "context_exchange": "all_gather"}),
    "sequences cut among ranks, layers of TE": (2, CUT, {"context": 2, "context_exchange": "all_gather", **OF_TE}),
    "packed sequences": (2, ["packed", "model.tensor_model_parallel_size=2"], {"tensor": 2, **OF_TE}),
    "packed sequences cut among ranks": (2, ["packed", *CUT], {"context": 2, "context_exchange": "all_gather", **OF_TE}),
    "experts": (2, EXPERTS, {**WITH_EXPERTS, "microbatches": 2}),
    "captured graphs": (2, GRAPHS, {"tensor": 2, "sequence_parallel": True, "captured": ("attn",), **OF_TE}),
    "a hybrid stack that is a GPT": (2, ["hybrid", "model.tensor_model_parallel_size=2"], {"tensor": 2, **OF_TE}),
    "FP8": (1, ["model.fp8='hybrid'", "model.fp8_recipe='tensorwise'"], {"fp8": {"recipe": "tensorwise"}, **OF_TE}),
}
"""Ranks, words of the script, and what makes the same job."""


@pytest.mark.parametrize(
    ("layout", "release"),
    [*((layout, "0.6") for layout in LAYOUTS), *((layout, "0.5") for layout in LAYOUTS if layout.startswith("packed"))],
)
def test_every_bit_is_stocks(tmp_path, layout, release):
    ranks, words, facts = LAYOUTS[layout]
    save_plan(uniform_plan(tiny_job("llama", **{**SIZE, **DROPOUT, **facts})), tmp_path / "plan.yaml")
    assert run(tmp_path, "stock", words, ranks=ranks, release=release)[0] == 0
    under = ["--lynx-plan", str(tmp_path / "plan.yaml"), "--lynx-check", "2"]
    status, said = run(tmp_path, "planned", [*words, *under], ranks=ranks, release=release)
    assert status == 0, said[-3000:]
    assert same(tmp_path, "stock", "planned", ranks)
    assert "checked 2 steps against stock without recomputation: in each, " in said
    assert re.search(r"rank 0 recomputed (64|128) layer halves", said)
    assert ("CUDA Graphs capture on rank 0" in said) == (layout == "captured graphs"), "between the two steps that are checked"


@pytest.mark.parametrize("release", ["0.6", "0.5"])
def test_mamba_layers_of_a_stack(tmp_path, release):
    """Bridge's own, with a stand-in for their kernels, under a plan for the configuration as Bridge writes it."""
    words = ["mamba", "model.tensor_model_parallel_size=2", "model.sequence_parallel=True"]
    status, said = run(tmp_path, "stock", words, release=release)
    assert status == 0, said[-3000:]
    reading = read_launch(["--bridge", str(tmp_path / "stock_cfg.yaml"), "tokenizer.vocab_size=511"], gpus=2)
    assert reading.problems == ()
    save_plan(uniform_plan(job_of(reading, "h100-80g")), tmp_path / "plan.yaml")
    under = ["--lynx-plan", str(tmp_path / "plan.yaml"), "--lynx-check", "2"]
    status, said = run(tmp_path, "planned", [*words, *under], release=release)
    assert status == 0, said[-3000:]
    assert same(tmp_path, "stock", "planned", 2)
    # 4 steps x 4 micro-batches x 4 layers; of two of them the first half is a Mamba layer, which is kept
    assert "rank 0 recomputed 96 layer halves" in said


def test_out_of_memory_is_explained(tmp_path):
    """As under Megatron-LM, whoever of the ranks it meets first."""
    save_plan(uniform_plan(tiny_job("llama", tensor=2, **SIZE, **DROPOUT)), tmp_path / "plan.yaml")
    words = [*TP2, "--lynx-plan", str(tmp_path / "plan.yaml")]
    status, said = run(tmp_path, "full", words, **{MEMORY_BYTES: "2300000"})
    assert status != 0, said[-3000:]
    assert "out of device memory in step 2 of this run" in said
    assert "Pretrain failed" not in said, "as Bridge says of other errors, with a traceback"
    assert "of micro-batch " in said
    assert said.count("nearest change that fits: megatron-lynx plan --memory-gib ") == 1
    assert "/megatron_lynx/" not in said.partition("out of device memory")[2], "no traceback of ours"


def test_a_run_saves_ends_by_interval_and_resumes_under_another_plan(tmp_path):
    """With evaluation behind every step, against stock that resumes what stock saved."""
    job = tiny_job("llama", **{**SIZE, **DROPOUT}, pipeline=2, layers_per_chunk=1, **OF_TE)
    save_plan(uniform_plan(job), tmp_path / "first.yaml")
    save_plan(uniform_plan(job, recompute=("activation",)), tmp_path / "second.yaml")
    words, losses = [*CHUNKS, "validation.eval_interval=1", "validation.eval_iters=1"], {}
    for name in ("stock", "planned"):
        plans = (["--lynx-plan", str(tmp_path / f"{part}.yaml")] for part in ("first", "second"))
        first, second = plans if name == "planned" else ([], [])
        save = ["train.exit_interval=2", f"checkpoint.save='{tmp_path / name}'", "checkpoint.save_interval=2"]
        status, said = run(tmp_path, f"{name} begins", [*words, *save, *first])
        assert status == 0, said[-3000:]
        assert ("how this run of 2 steps came out" in said) == (name == "planned")
        status, more = run(tmp_path, f"{name} goes on", [*words, f"checkpoint.load='{tmp_path / name}'", *second])
        assert status == 0, more[-3000:]
        losses[name] = re.findall(r"validation loss at .*?lm loss value: (\S+)", said + more)
    assert same(tmp_path, "stock begins", "planned begins", 2, steps=2)
    assert same(tmp_path, "stock goes on", "planned goes on", 2, steps=2)
    assert losses["stock"] == losses["planned"]
    assert len(losses["stock"]) >= 4


def test_more_tokens_than_planned_are_kept_and_said(tmp_path):
    """Of four micro-batches with 32, 128, 64 and 16 tokens the second has more than 64: it runs as stock's. Bridge silences
    warnings of all loggers, which swallowed this one."""
    save_plan(uniform_plan(tiny_job("llama", tensor=2, **SIZE, **DROPOUT)), tmp_path / "plan.yaml")
    words = [*TP2, "changing"]
    assert run(tmp_path, "stock", words)[0] == 0
    status, said = run(tmp_path, "planned", [*words, "--lynx-plan", str(tmp_path / "plan.yaml")])
    assert status == 0, said[-3000:]
    assert same(tmp_path, "stock", "planned", 2)
    assert "rank 0 recomputed 96 layer halves" in said
    assert said.count("has 128 tokens on this rank, and the plan holds for at most 64") == 2, "once on each rank"
    assert "what came: 4 of 4 micro-batches, 93.8 % of their tokens, 133 % of the squares of lengths" in said


def test_adapters(tmp_path):
    """Adapters beside a frozen model, which comes from a checkpoint: Bridge asks for one."""
    folder = tmp_path / "weights"
    saved_words = [f"checkpoint.save='{folder}'", "checkpoint.save_interval=1", "train.train_iters=1"]
    for layers, words, fields in (("te", [], OF_TE), ("local", TP2, {"tensor": 2})):
        ranks = 2 if "tensor" in fields else 1
        base = [word for word in words if word == "local"]
        status, said = run(tmp_path, f"base {layers}", [*base, *saved_words], ranks=1)
        assert status == 0, said[-3000:]
        words = [*words, "lora", f"checkpoint.pretrained_checkpoint='{folder}'"]
        job = tiny_job("llama", **{**SIZE, **DROPOUT, **fields}, adapters={"rank": 8})
        save_plan(uniform_plan(job), tmp_path / "plan.yaml")
        status, said = run(tmp_path, f"stock {layers}", words, ranks=ranks)
        assert status == 0, said[-3000:]
        under = ["--lynx-plan", str(tmp_path / "plan.yaml"), "--lynx-check", "2"]
        status, said = run(tmp_path, f"planned {layers}", [*words, *under], ranks=ranks)
        assert status == 0, said[-3000:]
        assert same(tmp_path, f"stock {layers}", f"planned {layers}", ranks)
        assert "rank 0 recomputed 128 layer halves" in said


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["dora"], "cfg.peft"),
        (["ddp.use_megatron_fsdp=True", "dist.use_megatron_fsdp=True", "checkpoint.ckpt_format='fsdp_dtensor'"], "cfg.ddp"),
    ],
)
def test_what_no_plan_goes_with_is_refused(tmp_path, words, place):
    """Before the model is built, without a traceback. (Decentralised groups and restarts cannot begin here: `test_hosts`.)"""
    save_plan(uniform_plan(tiny_job("llama", **{**SIZE, **DROPOUT}, **OF_TE)), tmp_path / "plan.yaml")
    (tmp_path / "weights").mkdir()  # which adapters begin with; refused before they are read
    words = [*words, f"checkpoint.pretrained_checkpoint='{tmp_path / 'weights'}'"] if "dora" in words else words
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    status, said = run(tmp_path, "refused", [*words, "--lynx-plan", str(tmp_path / "plan.yaml")], ranks=1, **env)
    assert status == 2, said[-3000:]
    assert f"  - {place}" in said
    assert "Traceback" not in said.partition("megatron-lynx: ")[2]


def test_recipes_are_planned_for(tmp_path):
    """Experts and hybrid stacks with Mamba layers; adapters beside experts are refused by name."""
    status, said = run(tmp_path, "recipes", [str(tmp_path)], ranks=1, launcher=[], script="bridge_recipes.py", HF_HUB_OFFLINE="1")
    assert status == 0, said[-3000:]
    for name in ("qwen3_30b", "qwen3_30b_lora", "nemotron_h_8b", "nemotron_3_nano"):
        asked = (
            "plan",
            "--cluster",
            "h100-80g",
            "--gpus",
            16,
            "-o",
            tmp_path / "plan.yaml",
            "--bridge",
            tmp_path / f"{name}.yaml",
        )
        result = lynx(*asked, "--", "tokenizer.vocab_size=151936")
        assert result.exit_code == (2 if name.endswith("lora") else 0), result.output
        assert ("adapters go with no experts" in result.output) == name.endswith("lora")


def test_what_does_not_fit_is_named_as_bridges_users_name_it(tmp_path):
    """All at once, before the model is built, without a traceback."""
    save_plan(uniform_plan(tiny_job("llama", tensor=1, **{**SIZE, "seq": 32})), tmp_path / "plan.yaml")
    words = [*TP2, "model.recompute_granularity=full", "model.recompute_method=uniform", "model.recompute_num_layers=1"]
    status, said = run(tmp_path, "refused", [*words, "--lynx-plan", str(tmp_path / "plan.yaml")])
    assert status != 0
    found = re.findall(r"^  - (cfg\.\S+?): found", said, re.MULTILINE)
    assert found == ["cfg.model.tensor_model_parallel_size", "cfg.model.seq_length", "cfg.model.recompute_*"]
    assert "Pretrain failed" not in said
