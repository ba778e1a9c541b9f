"""Where benchmarks write: a wrong folder is said before anything is measured, and rows are kept as they come."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
FOLDER = re.compile(r'add_argument\((?:"-o", )?"(--out(?:put)?)"|add_out\(')
MORE = {"benchmarks.simulated_against_real": ["jobs/demo"], "benchmarks.launches": ["."]}
"""What else some of them have to be told."""


def those_that_write() -> Iterator[tuple[str, str]]:
    """Modules that take a folder, and their flag for it."""
    for file in sorted(BENCHMARKS.rglob("*.py")):
        if file.name != "results_folder.py" and (found := FOLDER.search(file.read_text())):
            name = ".".join(file.relative_to(BENCHMARKS.parent).with_suffix("").parts)
            yield name, found[1] or "--out"


def module_that_measures(name: str) -> ModuleType:
    """`one_core` is told by another one what to measure."""
    return importlib.import_module("benchmarks.solver_speed" if name == "benchmarks.one_core" else name)


@pytest.mark.parametrize(("name", "flag"), list(those_that_write()))
def test_a_wrong_folder_is_said_before_anything_is_measured(name, flag, tmp_path, monkeypatch, capsys) -> None:
    """One measured for nine minutes, and failed then because the folder was not there: nothing was kept."""
    (tmp_path / "file").write_text("in the way")
    module = module_that_measures(name)
    monkeypatch.setattr(sys, "argv", [name, *MORE.get(name, []), flag, str(tmp_path / "file" / "results")])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 2
    assert f"{tmp_path / 'file' / 'results'}: found a file where a folder is needed" in capsys.readouterr().err


def test_rows_are_kept_as_they_come_in_a_folder_that_was_not_there(tmp_path, monkeypatch) -> None:
    from benchmarks import both_fillers

    def one_row(modes, rates, rounds) -> Iterator[both_fillers.Row]:
        yield both_fillers.Row(False, 1000.0, "none", 1.5, 1.0, 1.0)
        raise ConnectionError("a rank is gone")

    monkeypatch.setattr(both_fillers, "measure", one_row)
    folder = tmp_path / "new" / "results"
    monkeypatch.setattr(sys, "argv", ["both_fillers", "-o", str(folder)])
    with pytest.raises(ConnectionError):
        both_fillers.main()
    [kept] = folder.glob("*-both-fillers.json")
    assert [row["step_s"] for row in json.loads(kept.read_text())["rows"]] == [1.5]
    assert "| 1.500 |" in kept.with_suffix(".md").read_text()
