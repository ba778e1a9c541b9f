"""The command line: what it answers, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from megatron_lynx.cli import app
from megatron_lynx.plan import load_plan
from megatron_lynx.version import __version__
from megatron_lynx.yaml_file import write_yaml
from tests.plan.test_plan_file import small_plan


def lynx(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def test_version() -> None:
    assert lynx("--version").stdout == f"{__version__}\n"


def test_explain_says_what_happens_where(tmp_path: Path) -> None:
    data = small_plan()
    first = data["stages"][0]
    ahead, on_demand = first["rules"][0] | {"layers": 2}, first["rules"][0] | {"layers": 1}
    first["rules"] = [ahead | {"windows": {"mlp": "pipe.recv_backward"}}, on_demand]
    first |= {"ahead_depth": 1, "predicted": {"step_s": 1.25, "resident_activation_bytes": 2**21}}
    (tmp_path / "plan.yaml").write_text(write_yaml(data))
    result = lynx("explain", tmp_path / "plan.yaml")
    assert result.exit_code == 0, result.output
    for text in (
        "stage 0: layers 1-2",
        "pipe.recv_backward",
        "linear_fc2",
        "on_demand",
        "step 1.25 s",
        "2.00 MiB",
        "nothing is stated",
    ):
        assert text in result.stdout
    answer = lynx("explain", tmp_path / "plan.yaml", "--json").stdout
    assert json.loads(answer) == load_plan(tmp_path / "plan.yaml").model_dump(mode="json", exclude_none=True)


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        (None, ["no such file"]),
        ("", ["an empty file"]),
        ("version: 1\nversion: 1\n", ["plan.yaml:2: found 'version' a second time"]),
        ("version: 9\n", ["found 9, needed 1; upgrade"]),
        ("version: 1\nstages: [{stage: 0,\n", ["plan.yaml:3: "]),
        ("version: 1\ncolour: '[bold]'\n", ["colour: found an unknown key", "model: found nothing", "stages: found nothing"]),
    ],
)
def test_a_wrong_plan_ends_with_status_2_and_no_traceback(tmp_path: Path, text: str | None, answers: list[str]) -> None:
    path = tmp_path / "plan.yaml"
    if text is not None:
        path.write_text(text)
    result = lynx("explain", path, "--json")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert all(answer in result.stderr for answer in answers), result.stderr


def test_a_mistyped_command_is_a_wrong_request() -> None:
    assert lynx("explian", "plan.yaml").exit_code == 2
