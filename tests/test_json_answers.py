"""The answers of all commands as JSON: a version, and the keys that their schema names."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from megatron_lynx.config.loader import bundled_configs
from megatron_lynx.published import korthikanti
from megatron_lynx.published.row import published_figures
from tests.json_answers import ANSWERS
from tests.test_cli import lynx
from tests.test_inputs import LAUNCH

pytestmark = pytest.mark.slow

PLAN = bundled_configs() / "plans/llama-7b-a100-80g.yaml"
OF_A_LAUNCH = ["--cluster", "h100", "--", *shlex.split(LAUNCH)]
COMMANDS = [
    ["advise", *OF_A_LAUNCH],
    ["advise", "jobs/llama-7b-a100-80g"],
    ["compare", "--simulate", "-o", "OUT", *OF_A_LAUNCH],
    ["doctor"],
    ["estimate", *OF_A_LAUNCH],
    ["estimate", "jobs/llama-65b"],
    ["hooks"],
    ["plan", "-o", "OUT.yaml", *OF_A_LAUNCH],
    ["plan", "-o", "OUT.yaml", "--memory-gib", "1", *OF_A_LAUNCH],
    ["search", "--gpus", "8", "--top", "1", "--policies", "none,full", "jobs/llama-7b-a100-80g"],
    ["simulate", PLAN, "--job", "jobs/llama-7b-a100-80g"],
    ["validate"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(map(str, command[:4])))
def test_an_answer_is_as_its_model_says(command: list[str | Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if command == ["validate"]:  # all rows have the same keys
        rows = [*korthikanti.rows(published_figures()["korthikanti"])]
        assert {row.step is not None for row in rows} == {True, False}
        monkeypatch.setattr("megatron_lynx.published.all_rows", lambda: rows)
    words = [tmp_path / word if str(word).startswith("OUT") else word for word in command]
    name, *others = words
    done = lynx(name, "--json", *others)
    assert done.exit_code in (0, 1), done.output
    answer = json.loads(done.stdout)
    assert next(iter(answer)) == "version"
    read = ANSWERS[str(name)].model_validate(answer, strict=True)
    if name == "estimate":
        return  # its lines depend on what the job has
    named = read.model_dump(exclude_unset=True)
    assert named == answer, "a key that it does not name"
