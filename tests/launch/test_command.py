"""The command line alone: what is read, and what is refused before anything is imported."""

from __future__ import annotations

import argparse
from importlib.util import find_spec

import pytest

from megatron_lynx.errors import ConfigError
from megatron_lynx.launch.script import Flags, add_flags, main, read, read_flags


def test_our_flags_among_those_of_the_script():
    flags = read_flags(["--lr", "1e-3", "--lynx-plan", "plan.yaml", "--lynx-trace=out.json", "--bf16", "--lynx-trace-step", "7"])
    assert flags == Flags("plan.yaml", "out.json", 7, lynx_log="warning")
    assert flags.lynx_plan == "plan.yaml"


def test_no_flags_is_a_plain_run():
    assert read_flags(["--num-layers", "4"]) == Flags()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--lynx-paln", "plan.yaml"], "--lynx-paln: found no such flag"),
        (["--lynx-plan"], "--lynx-plan: expected one argument"),
        (["--lynx-trace", "out.json"], "--lynx-trace: found no --lynx-plan"),
        (["--lynx-plan", "p", "--lynx-trace", "t", "--lynx-trace-step", "0"], "--lynx-trace-step: found 0, needed a step"),
        (["--lynx-outcome", "out.json"], "--lynx-outcome: found no --lynx-plan"),
        (["--lynx-check", "2"], "--lynx-check: found no --lynx-plan"),
        (["--lynx-plan", "p", "--lynx-check", "0"], "--lynx-check: found 0, needed how many steps"),
        (["--lynx-check", "frames"], "--lynx-check: found no --lynx-plan"),
        (
            ["--lynx-plan", "p", "--lynx-check", "frames:"],
            "--lynx-check: found frames:, needed how many steps, from 1, or frames",
        ),
        (["--lynx-plan", "p", "--lynx-check", "frames:0"], "--lynx-check: found frames:0, needed"),
        (["--lynx-plan", "p", "--lynx-check", "framed"], "--lynx-check: found framed, needed"),
        (
            ["--lynx-plan", "p", "--lynx-check", "frames", "--lynx-check-against", "full"],
            "--lynx-check-against: found --lynx-check frames:5, which compares with no stock",
        ),
        (["--lynx-plan", "p", "--lynx-check-against", "full"], "--lynx-check-against: found no --lynx-check"),
        (["--lynx-log", "loud"], "--lynx-log: invalid choice: 'loud'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistyped_flag(arguments, says):
    with pytest.raises(ConfigError, match=says) as refused:
        read_flags(arguments)
    assert refused.value.exit_status == 2


def test_megatrons_parser_reads_the_same():
    parser = add_flags(argparse.ArgumentParser(allow_abbrev=False))
    assert Flags(**vars(parser.parse_args(["--lynx-plan", "plan.yaml"]))) == Flags("plan.yaml")
    assert "megatron-lynx" in parser.format_help()


def test_everything_is_handed_to_the_script(tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    assert read([str(script), "--lynx-plan", "p", "--lr", "1"])[:2] == (script, ["--lynx-plan", "p", "--lr", "1"])


@pytest.mark.parametrize("arguments", [[], ["--lynx-plan", "p"], ["nowhere.py"]], ids=str)
def test_no_script(arguments, capsys):
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("megatron-lynx: the launch cannot be read")
    assert "Traceback" not in said


@pytest.mark.skipif(find_spec("megatron.training") is not None, reason="this megatron-core brings megatron.training")
def test_a_script_without_megatron(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.touch()
    assert main([str(script)]) == 2
    assert "put the checkout that the script belongs to on PYTHONPATH" in capsys.readouterr().err


def test_usage(capsys):
    assert main(["--help"], module="tests.instruments") == 0
    assert "-m tests.instruments SCRIPT" in capsys.readouterr().out


def test_the_host_may_stand_before_the_script(tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    for words in (
        ["--lynx-host", "bridge", str(script), "a=1"],
        ["--lynx-host=bridge", str(script), "a=1"],
        [str(script), "a=1"],
    ):
        found, behind, flags = read(words)
        host = "megatron-lm" if words[0] == str(script) else "bridge"
        assert (found, behind[0], flags.lynx_host) == (script, "a=1", host)
    assert "megatron_core" in str(read([str(script), "--lynx-host", "megatron-lm", "megatron_core"])[1])
    with pytest.raises(ConfigError, match="--lynx-host: invalid choice: 'nemo'"):
        read(["--lynx-host", "nemo", str(script)])


def test_a_script_of_bridges_finds_its_own_words():
    """It hands `sys.argv` to a parser that knows nothing of ours."""
    from megatron_lynx.launch.hosts import Bridge

    words = ["--lynx-plan", "p.yaml", "model.seq_length=64", "--lynx-check=2", "--hf_path", "x", "--lynx-host", "bridge"]
    assert list(Bridge().arguments_of(words)) == ["model.seq_length=64", "--hf_path", "x"]
