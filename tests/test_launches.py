"""Ready launches: their shell is clean, Megatron's own parser takes them as they are read here, and each fits its plan.

That their plans are current is `test_make_plans`; `tests/launch/test_sweep.py` runs the one for CPUs.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.ready_launches import table
from megatron_lynx.launch.launch import arguments_against
from megatron_lynx.launch_arguments import read_launch
from megatron_lynx.launch_arguments.command_line import without_option
from megatron_lynx.plan import load_plan
from megatron_lynx.plan.layout import layer_flags
from scripts.make_plans import LAUNCHES, MEMORY_GIB, launch_words, plan_path
from tests.long import long

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "scripts/launches"
READY = [(name, cluster) for name in LAUNCHES for cluster in MEMORY_GIB]


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(FOLDER / script), *arguments]
    return subprocess.run(
        command, env={"PATH": os.environ["PATH"], **environment}, capture_output=True, text=True, check=False, timeout=60
    )


def test_every_launch_is_here() -> None:
    assert {path.stem for path in FOLDER.glob("*.sh")} == {*LAUNCHES, "gpt_tiny_cpu", "llama3_8b_one_gpu", "launch"}


@pytest.mark.parametrize(("name", "cluster"), READY)
def test_a_launch_is_for_its_plan(name: str, cluster: str) -> None:
    """What it says about layers is what its plan needs; the launcher's own check has nothing against it."""
    words, plan = launch_words(name, cluster, "plan"), load_plan(plan_path(name, cluster))
    assert words[words.index("--lynx-plan") + 1] == str(plan_path(name, cluster))
    under_none = " ".join(launch_words(name, cluster, "none"))
    needed = [word for flag in layer_flags(plan) if flag not in under_none for word in shlex.split(flag)]
    assert needed == words[words.index("--lynx-plan") + 2 :]
    reading = read_launch(words)
    assert reading.problems == ()
    names = "num_layers hidden_size ffn_hidden_size num_attention_heads seq_length micro_batch_size"
    names += " tensor_model_parallel_size context_parallel_size pipeline_model_parallel_size sequence_parallel"
    arguments = Namespace(**{name: reading.given[name] for name in names.split()})
    arguments.ffn_hidden_size = reading.job_data["model"]["ffn"]
    layout = reading.job_data["parallel"]
    chunk_layers = layout.get("layers_per_chunk", arguments.num_layers // layout["pipeline"])
    arguments.virtual_pipeline_model_parallel_size = arguments.num_layers // (layout["pipeline"] * chunk_layers)
    assert list(arguments_against(plan, arguments)) == []
    sizes = reading.job_data
    replicas = sizes["gpus"] // (sizes["parallel"]["tensor"] * sizes["parallel"]["pipeline"])
    assert sizes["batch"]["global"] == sizes["batch"]["micro"] * plan.batch.microbatches * replicas


@pytest.mark.slow
def test_planned_from_a_shell_a_launch_leads_to_its_plan(tmp_path: Path) -> None:
    """With the layers left open, as the ready plan was made; each word on a line, so that xargs need not guess."""
    script, path, memory_gib = FOLDER / "llama3_70b.sh", tmp_path / "plan.yaml", MEMORY_GIB["a100-80g"]
    lynx = f"{shlex.quote(sys.executable)} -m megatron_lynx plan --cluster a100-80g --memory-gib {memory_gib} -o {path} --"
    command = f"CLUSTER=a100-80g SETTING=none bash {script} --print | xargs -d '\\n' {lynx}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    ready = load_plan(plan_path("llama3_70b", "a100-80g"))
    assert [stage.rules for stage in load_plan(path).stages] == [stage.rules for stage in ready.stages]
    assert " ".join(layer_flags(ready)) in done.stdout


def test_the_page_has_their_figures() -> None:
    assert table() in (ROOT / "docs/generated/ready_launches.md").read_text(), "run `python -m scripts.make_pages ready_launches`"


def test_segments_do_not_grow_beside_nccl_ub() -> None:
    """Megatron raises for both together, before torch 2.11."""
    growing = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    assert growing in run("gpt_13b.sh", "--print").stdout.splitlines()
    assert growing not in run("gpt_13b.sh", "--print", "--use-nccl-ub").stdout.splitlines()


def test_more_nodes_leave_a_pipelines_micro_batches() -> None:
    few, many = (run("gpt_175b.sh", "--print", NODES=nodes).stdout.splitlines() for nodes in ("8", "16"))
    batches = [int(words[words.index("--global-batch-size") + 1]) for words in (few, many)]
    assert batches[1] == 2 * batches[0]
    assert read_launch(many).command.gpus == 128


def test_the_launch_whose_norms_need_a_margin_sets_one() -> None:
    """Its plan recomputes norms of rows of 12288 in windows."""
    margin = "NVTE_FWD_LAYERNORM_SM_MARGIN=16"
    assert margin in run("gpt_175b.sh", "--print").stdout.splitlines()
    assert margin not in run("llama3_70b.sh", "--print").stdout.splitlines()


def test_what_can_be_set_from_outside() -> None:
    variables = {
        "DATA_PATH": "/data/text",
        "TOKENIZER": "llama",
        "CHECKPOINTS": "/kept",
        "PLAN": "mine.yaml",
        "MASTER_ADDR": "n1",
    }
    words = run("llama3_70b.sh", "--print", "--seed", "5", **variables).stdout.splitlines()
    text = " ".join(words)
    for part in ("--data-path /data/text", "--tokenizer-model llama", "--save /kept", "--lynx-plan mine.yaml", "n1:29500"):
        assert part in text
    assert words[-2:] == ["--seed", "5"]
    assert "--mock-data" not in words
    assert "--pipeline-model-parallel-layout" not in words, "it belongs to the ready plan"


def test_a_setting_that_does_not_exist() -> None:
    done = run("llama3_8b.sh", SETTING="best")
    assert (done.returncode, done.stderr) == (2, "SETTING: found best, needed plan, none, selective or full\n")


def test_under_slurm_each_node_runs_the_launch(tmp_path: Path) -> None:
    stubs = {"scontrol": "echo first; echo second", "srun": 'shift; exec "$@"', "torchrun": 'printf "%s\\n" torchrun "$@"'}
    for name, body in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "pretrain_gpt.py").touch()
    slurm = {
        "MEGATRON_LM_DIR": str(tmp_path),
        "SLURM_JOB_NODELIST": "x",
        "SLURM_JOB_NUM_NODES": "16",
        "SLURM_JOB_ID": "7",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    done = run("slurm.sbatch", str(FOLDER / "gpt_175b.sh"), "--seed", "5", **slurm)
    words = done.stdout.splitlines()
    assert words[:9] == shlex.split("torchrun --nproc-per-node 8 --nnodes 16 --rdzv-backend c10d --rdzv-id 7")
    assert words[10] == "first:29500"
    assert words[-2:] == ["--seed", "5"]


@pytest.mark.parametrize("settings", [1, *long(4)])
@pytest.mark.slow
def test_megatrons_own_parser_takes_them_and_reads_the_same(monkeypatch: pytest.MonkeyPatch, settings: int) -> None:
    """Every launch under so many settings, each under another one first, by the parser of the newest wheel (or of
    MEGATRON_LM_DIR)."""
    wheel = Path(os.environ.get("MEGATRON_LM_DIR") or os.environ.get("MEGATRON_CORE_0_19_DIR", "")).resolve()
    if not (wheel / "megatron" / "training").is_dir():
        pytest.skip(f"no megatron.training in {wheel} (MEGATRON_CORE_0_19_DIR; `make test` downloads it where it can)")
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import check_examples

    asked = [
        (f"{name} {cluster} {setting}", launch_words(name, cluster, setting))
        for at, (name, cluster) in enumerate(READY)
        for setting in (SETTINGS * 2)[at % len(SETTINGS) :][:settings]
    ]
    asked.append(("gpt_tiny_cpu", run("gpt_tiny_cpu.sh", "--print", SETTING="none").stdout.splitlines()))
    launches = [check_examples.Launch(name, tuple(without_option(words, "--lynx-plan")[0])) for name, words in asked]
    for launch, answer in zip(launches, check_examples.megatron_on(wheel, launches), strict=True):
        found = {fact.place: fact.value for fact in read_launch(launch.words, planning=False).facts}
        assert answer["taken"], launch.example
        assert len(answer["values"]) > 15
        assert {place: found.get(place) for place in answer["values"]} == answer["values"], launch.example


SETTINGS = ("none", "selective", "full", "plan")


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_shellcheck_has_nothing_to_say() -> None:
    scripts = [*FOLDER.glob("*.sh"), *FOLDER.glob("*.sbatch")]
    command = ["shellcheck", "-x", "-P", "SCRIPTDIR", *map(str, scripts)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout


LINE = (
    " [2026-01-01 00:00:00] iteration {:8}/       5 | consumed samples: 8 | elapsed time per iteration (ms): {:.1f} "
    "| learning rate: 1.0E-04 | global batch size: 8 | lm loss: {} | loss scale: 1.0 | grad norm: 2.5 | skipped: 0 |\n"
)
MEMORY = (
    "[Rank {}] (after 2 iterations) memory (MB) | allocated: 9.00 | max allocated: {:.2f} | reserved: 1.00 | max reserved: 9.0\n"
)


def log_of(steps: list[float], loss: str) -> str:
    return "".join(LINE.format(number, step, loss) for number, step in enumerate(steps, 1))


def test_a_table_of_logs(tmp_path: Path) -> None:
    """The first three steps are not counted, the fullest rank is shown, losses are compared digit by digit."""
    logs = {
        "none": "torch.OutOfMemoryError: CUDA out of memory",
        "full": log_of([9000, 9000, 9000, 1400, 1500], "5.5E+00") + MEMORY.format(0, 2048) + MEMORY.format(1, 3072),
        "plan": log_of([9000, 9000, 9000, 1000, 1030], "5.5E+00")
        + "megatron-lynx: rank 0 recomputed 80 layer halves: 60 inside windows, 20 on demand\n",
        "selective": log_of([1, 1, 1, 1450, 1450], "5.6E+00"),
    }
    for setting, text in logs.items():
        (tmp_path / setting).write_text(text)
    command = [sys.executable, str(FOLDER / "sweep.py"), "--logs", *(f"{setting}={tmp_path / setting}" for setting in logs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[2:] == [
        "| none | out of memory | | | | |",
        "| full | 1.450 s | 1.000 | 3.0 GiB | - |  |",
        "| plan | 1.015 s | 0.700 | - | equal | 60 / 20 |",
        "| selective | 1.450 s | 1.000 | - | differ |  |",
    ]


def test_a_log_that_ends_early_is_compared_as_far_as_it_goes(tmp_path: Path) -> None:
    logs = {"none": log_of([1000] * 6, "5.5E+00"), "full": log_of([1000] * 5, "5.5E+00")[:-150], "plan": log_of([1000] * 2, "5")}
    for setting, text in logs.items():
        (tmp_path / setting).write_text(text)
    command = [sys.executable, str(FOLDER / "sweep.py"), "--logs", *(f"{setting}={tmp_path / setting}" for setting in logs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert done.stdout.splitlines()[3:] == [
        "| full | 1.000 s | 1.000 | - | equal in 4 of 6 |  |",
        "| plan | no step after the first 3 | | | | |",
    ]


def test_a_sweep_over_nothing_says_what_is_missing(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "sweep.py"), "--logs", f"none={tmp_path}", "plan"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert f"found no file {tmp_path}" in done.stderr
    assert "found 'plan', needed SETTING=LOG" in done.stderr


@pytest.mark.parametrize(
    ("environment", "answer"),
    [
        ({"CLUSTER": "a100"}, "CLUSTER a100: found no plan of gpt-13b, needed one of"),
        ({"PLAN": "/none.yaml"}, "PLAN: found no file /none.yaml"),
        ({"NODES": "0"}, "NODES: found 0, needed a whole number"),
        ({"GPUS_PER_NODE": "3"}, "found 3, needed a multiple of 4"),
        ({"MEGATRON_LM_DIR": "/none"}, "found no /none/pretrain_gpt.py"),
    ],
)
def test_a_launch_that_cannot_be_is_not_launched(environment: dict[str, str], answer: str) -> None:
    done = run("gpt_13b.sh", **environment)
    assert done.returncode == 2
    assert answer in done.stderr


@pytest.mark.parametrize("script", [*(f"{name}.sh" for name in LAUNCHES), "gpt_tiny_cpu.sh", "llama3_8b_one_gpu.sh"])
def test_a_launch_names_no_plan_that_is_not_there(script: str) -> None:
    """With --print a launch printed the path of a plan that nobody had made."""
    refused = run(script, "--print", CLUSTER="elsewhere")
    assert (refused.returncode, refused.stdout) == (2, ""), refused.stderr
    assert "CLUSTER elsewhere: found no plan of" in refused.stderr
    assert run(script, "--print", CLUSTER="elsewhere", PLAN="own.yaml").stdout.splitlines()[-1] == "own.yaml"
