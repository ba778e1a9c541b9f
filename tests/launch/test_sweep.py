"""The sweep over a ready launch, with the real `pretrain_gpt.py` of a checkout (MEGATRON_LM_DIR), on ranks of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lynx.config import Job
from megatron_lynx.launch_arguments import read_launch
from megatron_lynx.plan import save_plan
from tests.tiny_jobs import tiny_job
from tests.uniform import uniform_plan

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "scripts/launches/gpt_tiny_cpu.sh"


def test_the_same_launch_under_stock_and_under_a_plan(tmp_path: Path) -> None:
    checkout = Path(os.environ.get("MEGATRON_LM_DIR", "")).resolve()
    if not (checkout / "pretrain_gpt.py").is_file():
        pytest.skip(f"no pretrain_gpt.py in {checkout} (MEGATRON_LM_DIR: a checkout of Megatron-LM, 0.16 to 0.19)")
    environment = {
        **os.environ,
        "MEGATRON_LM_DIR": str(checkout),
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PLAN": str(tmp_path / "plan.yaml"),
        "OMP_NUM_THREADS": "1",
    }
    words = subprocess.run(["bash", str(LAUNCH), "--print"], env=environment, capture_output=True, text=True, check=True).stdout
    save_plan(uniform_plan(job_of_launch(words.splitlines()), gather="once"), tmp_path / "plan.yaml")
    command = [sys.executable, str(ROOT / "scripts/launches/sweep.py"), str(LAUNCH), "-o", str(tmp_path), "--iterations", "4"]
    done = subprocess.run(
        [*command, "--settings", "none", "plan"], env=environment, capture_output=True, text=True, check=False, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "plan.log").read_text()[-3000:]
    none, plan = (line.split("|") for line in done.stdout.splitlines()[2:])
    assert [none[1].strip(), plan[1].strip()] == ["none", "plan"]
    assert plan[5].strip() == "equal"
    assert plan[6].split("/")[0].strip() != "0", "some are recomputed inside windows"


def job_of_launch(words: list[str]) -> Job:
    cluster = tiny_job().cluster.model_dump(mode="json")
    return Job.model_validate({**read_launch(words).job_data, "cluster": cluster})
