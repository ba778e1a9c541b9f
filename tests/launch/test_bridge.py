"""Megatron-Bridge under plans, on CPU ranks. `make bridge` installs what it needs, beside this checkout, and runs these tests.

Needs BRIDGE_PYTHON, an interpreter with torch and what Bridge imports, and folders of unpacked releases in BRIDGE_0_6_DIR and
BRIDGE_0_5_DIR.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from megatron_lynx.plan import save_plan
from megatron_lynx.planner import uniform_plan
from megatron_lynx.testbed.tiny_jobs import tiny_job

from ..te_releases import folder_of

HERE = Path(__file__).parent
LAUNCHER = ["-m", "megatron_lynx.testbed", "--lynx-host", "bridge"]
TP2 = ["local", "model.tensor_model_parallel_size=2"]
FOUR = ["model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=2", "model.sequence_parallel=True"]
SIZE = {"hidden": 64, "ffn": 128, "seq": 64, "vocab": 512, "microbatches": 4, "micro": 1}
DROPOUT = {"attention_dropout": 0.1, "hidden_dropout": 0.1}

pytestmark = pytest.mark.long


def run(folder: Path, name: str, words: list[str], *, ranks: int = 2, release: str = "0.6", launcher=LAUNCHER, **env: str):
    """The status of a run, and what was said; what every rank saw of its steps is in the folder, under the run's name."""
    python = os.environ.get("BRIDGE_PYTHON")
    if python is None:
        pytest.skip("no BRIDGE_PYTHON (`make bridge` installs one)")
    path = [folder_of("BRIDGE", release, "megatron/bridge"), folder_of("MEGATRON_CORE", "0.19", "megatron/training")]
    path += [folder_of("TRANSFORMER_ENGINE", "2.20", "transformer_engine"), HERE.parents[1]]
    environment = {**os.environ, **env, "NAME": name, "SAID_IN": str(folder), "PYTHONPATH": os.pathsep.join(map(str, path))}
    environment |= {"TESTBED_STAND_INS": "tests.instruments", "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    command = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *launcher]
    command += [str(HERE / "bridge_tiny.py"), *words]
    done = subprocess.run(
        command,
        env=environment | {"TORCHDYNAMO_DISABLE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def same(folder: Path, one: str, other: str, ranks: int) -> bool:
    """Losses, norms and weights of all ranks."""
    for rank in range(ranks):
        seen, expected = (torch.load(folder / f"{name}_{rank}.pt", weights_only=False) for name in (other, one))
        assert len(seen["steps"]) == len(expected["steps"]) == 4
        for (losses, norm), (wanted, wanted_norm) in zip(seen["steps"], expected["steps"], strict=True):
            if norm != wanted_norm or any(not torch.equal(losses[name], wanted[name]) for name in wanted):
                return False
        if not all(map(torch.equal, seen["weights"], expected["weights"])):
            return False
    return True


@pytest.mark.parametrize("release", ["0.6", "0.5"])
def test_local_layers_with_dropout(tmp_path, release):
    save_plan(uniform_plan(tiny_job("llama", tensor=2, **SIZE, **DROPOUT)), tmp_path / "plan.yaml")
    under = ["--lynx-plan", str(tmp_path / "plan.yaml"), "--lynx-check", "2"]
    assert run(tmp_path, "stock", TP2, release=release)[0] == 0
    status, said = run(tmp_path, "planned", [*TP2, *under], release=release)
    assert status == 0, said[-3000:]
    assert same(tmp_path, "stock", "planned", 2)
    assert "checked 2 steps against stock without recomputation: in each, 8 losses and the gradients of 54 parameters" in said
    # 4 steps x 4 micro-batches x 4 layers x 2 halves; the first half of a backward has no window
    assert "rank 0 replayed 128 layer halves: 112 inside windows, 16 on demand" in said
    status, said = run(tmp_path, "within", TP2, release=release, launcher=[], UNDER=str(tmp_path / "plan.yaml"))
    assert status == 0, said[-3000:]
    assert same(tmp_path, "stock", "within", 2)
    assert "rank 0 replayed 128 layer halves" in said


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


def test_what_does_not_fit_is_named_as_bridges_users_name_it(tmp_path):
    """All at once, before the model is built, without a traceback."""
    save_plan(uniform_plan(tiny_job("llama", tensor=1, **{**SIZE, "seq": 32})), tmp_path / "plan.yaml")
    words = [*TP2, "model.recompute_granularity=full", "model.recompute_method=uniform", "model.recompute_num_layers=1"]
    status, said = run(tmp_path, "refused", [*words, "--lynx-plan", str(tmp_path / "plan.yaml")])
    assert status != 0
    found = re.findall(r"^  - (cfg\.\S+?): found", said, re.MULTILINE)
    assert found == ["cfg.model.tensor_model_parallel_size", "cfg.model.seq_length", "cfg.model.recompute_*"]
    assert "Pretrain failed" not in said
