"""Inputs that ended in a traceback, in a terminal that obeyed them, or after minutes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lynx import yaml_file
from megatron_lynx.config.loader import bundled_configs
from megatron_lynx.errors import ConfigError
from megatron_lynx.launch_arguments.command_line import read_launch_file
from megatron_lynx.units import MIB
from megatron_lynx.whole_file import write_whole
from megatron_lynx.yaml_file import read_yaml
from tests.test_cli import lynx, run_cli

LAUNCH = """\
torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512
--max-position-embeddings 512 --micro-batch-size 1 --global-batch-size 16 --bf16 --vocab-size 32000
--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"""
PLAN = bundled_configs() / "plans/llama-7b-a100-80g.yaml"


def launch_file(folder: Path, more: str = "") -> Path:
    path = folder / "launch.args"
    path.write_text("\n".join([*LAUNCH.split(), *more.split()]), encoding="utf-8")
    return path


def test_a_link_to_a_file_that_is_not_there_yet_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_whole(tmp_path / "link", "content")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "content"


@pytest.mark.parametrize(
    "arguments",
    [
        ("estimate", "--launch-file", "/dev/zero", "--cluster", "h100-80g"),
        ("plan", "jobs/llama-7b-a100-80g", "-o", "out.yaml", "--lengths", "/dev/zero"),
        ("plan", "jobs/llama-7b-a100-80g", "-o", "out.yaml", "--from-run", "/dev/zero"),
    ],
)
def test_a_file_without_an_end_is_refused(arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was read until no memory was left."""
    monkeypatch.chdir(tmp_path)
    done = lynx(*arguments)
    assert done.exit_code == 2
    assert "/dev/zero: found more than 16.00 MiB, needed" in done.stderr


def test_nested_brackets_of_an_outcome_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("[" * 200_000)
    done = lynx("plan", "jobs/llama-7b-a100-80g", "-o", tmp_path / "plan.yaml", "--from-run", tmp_path / "run.json")
    assert done.exit_code == 2
    assert "run.json: found brackets nested too deeply, needed the lynx_outcome.json of a launch under a plan" in done.stderr


def test_a_byte_order_mark_is_no_part_of_the_first_word(tmp_path: Path) -> None:
    path = tmp_path / "launch.args"
    for text, words in (("torchrun\nx.py\n", ("torchrun", "x.py")), ("# cluster: h100-80g\nx.py\n", ("x.py",))):
        path.write_text(text, encoding="utf-8-sig")
        read = read_launch_file(path)
        assert read.words == words
    assert read.cluster == "h100-80g"


def test_what_users_write_does_not_command_the_terminal(tmp_path: Path) -> None:
    """A title of the window was set by a flag in a launch file."""
    evil = "--evil\x1b]0;title\x07"
    warned = lynx("estimate", "--cluster", "h100-80g", "--launch-file", launch_file(tmp_path, evil))
    assert warned.exit_code == 0, warned.output
    assert r"--evil\x1b]0;title\x07" in warned.stderr
    others = [
        lynx("estimate", "--cluster", "h100-80g", "--launch-file", launch_file(tmp_path, f"--num-layers {evil[2:]}")),
        lynx("explain", f"{evil}.yaml"),
        lynx("explain", "--", f"{evil}.yaml"),
        lynx(evil),
        lynx("estimate", "--cluster", "h100-80g", "--verbose", "--launch-file", launch_file(tmp_path, f"--swiglu {evil}")),
    ]
    for done in [warned, *others]:
        assert "\x1b" not in done.output
        assert "\x07" not in done.output
        assert r"\x1b]0;title\x07" in done.output


@pytest.mark.parametrize("arguments", [("--help",), ("plan", "--help")])
def test_help_that_nobody_reads_any_more_is_no_answer(arguments: tuple[str, ...]) -> None:
    """It ended with 1, the answer no."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = run_cli(*arguments, stdout=write_end)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


def test_yaml_of_very_many_values_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """15 MB of `[],` took a minute to be refused; so did a line that is no YAML, of the same size."""
    path = tmp_path / "file.yaml"
    path.write_text("a: [" + "[]," * (yaml_file.MOST_VALUES + 1))
    with pytest.raises(ConfigError, match="found more than 100000 keys and values"):
        read_yaml(path)
    path.write_text("a: " + "x" * MIB + "\n b: [\n")
    with pytest.raises(ConfigError, match=r"file\.yaml:2: mapping values are not allowed in this context"):
        read_yaml(path)


def test_a_cluster_without_a_launch_is_no_request() -> None:
    """`zip` of a launch without words ended in a traceback."""
    for command in (["estimate"], ["advise"], ["search", "--gpus", "8"], ["compare", "--simulate"], ["plan", "-o", "plan.yaml"]):
        done = lynx(*command, "--cluster", "h100-80g")
        assert done.exit_code == 2, done.output
        assert "LAUNCH: found nothing, needed a launch after --, or --launch-file FILE" in done.stderr
        assert "--num-layers" not in done.stderr


def test_a_launch_is_read_from_standard_input(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megatron_lynx", "estimate", "--cluster", "h100-80g", "--launch-file"]
    path = launch_file(tmp_path)
    answers = [
        subprocess.run([*command, file, "--json"], input=path.read_bytes(), capture_output=True, check=True, timeout=300).stdout
        for file in ("-", str(path))
    ]
    assert answers[0] == answers[1]
    assert json.loads(answers[0])["fits"]


JOB_PLANNED = ("plan", "jobs/llama-7b-a100-80g", "-o", "out.yaml")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((*JOB_PLANNED, "--offload-ratio", "2"), ("--offload-ratio", "'2'", "a number in [0, 1], or auto")),
        ((*JOB_PLANNED, "--offload-ratio", "much"), ("--offload-ratio", "'much'", "a number in [0, 1], or auto")),
        ((*JOB_PLANNED, "--optimizer-offload", "nan"), ("--optimizer-offload", "'nan'", "a number in [0, 1], or auto")),
        ((*JOB_PLANNED, "--lengths", "nosuch"), ("--lengths", "'nosuch'", "the mean length in tokens, above 0, or a file")),
        ((*JOB_PLANNED, "--lengths", "-1"), ("--lengths", "'-1'", "the mean length in tokens, above 0, or a file")),
        (("explain", "nosuch.yaml"), ("nosuch.yaml", "no such file", "a plan, which `megatron-lynx plan -o FILE` writes")),
        (("explain", "words"), ("words", "a single value at the top", "a plan, which `megatron-lynx plan -o FILE` writes")),
        (("report", "words"), ("words", "a single value at the top", "a plan, a job, a profile, a trace")),
    ],
)
def test_a_refusal_names_the_option_what_was_given_and_what_is_needed(
    words: tuple[str, ...], told: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job's key was named instead of the option, and a file that is no plan was said to lack `key: value`."""
    monkeypatch.chdir(tmp_path)
    Path("words").write_text("word")
    result = lynx(*words)
    output = " ".join(result.output.replace("\u2502", " ").split())
    assert result.exit_code == 2
    assert all(part in output for part in told), output
