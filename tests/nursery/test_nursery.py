"""Processes of the nursery are as fresh as they need to be."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.nursery.process import ADDRESS, AT_BEGIN, begin, start


def test_what_a_process_has_is_its_own(tmp_path: Path) -> None:
    """Environment, arguments, import path before that of Python, open files; and nothing of what is tried in several releases."""
    (tmp_path / "megatron_core_of_mine.py").touch()
    environment = {"MINE": "1", "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path.cwd())])}
    with open(tmp_path / "said", "w") as said, open(tmp_path / "secret", "w"):
        process = start("tests.nursery.telling", ["one", "two"], environment, said.fileno())
    assert process.wait(60) == 3
    found = json.loads((tmp_path / "said").read_text())
    assert found["arguments"] == ["one", "two"]
    assert found["environment"] == ["MINE", "PYTHONPATH", "TESTS_NURSERY"]
    assert found["path"][:2] == [str(Path.cwd()), str(tmp_path)]
    assert found["imported"] == ["torch"]
    assert len(found["threads"]) == 1
    assert sorted(found["files"]) == ["/dev/null", str(tmp_path / "said"), str(tmp_path / "said")]


def test_the_nursery_has_nothing_of_the_test_that_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first test of `make streams` names a compiler that is nobody's. The nursery had it, too, and a later test found none:
    torch reads that name when it is imported."""
    asked: list[dict[str, str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda *_, env, **__: asked.append(env) or SimpleNamespace(pid=1))
    monkeypatch.delenv(ADDRESS, raising=False)
    monkeypatch.setenv("CXX", "a compiler of nobody's")
    begin.__wrapped__()
    assert asked == [{**AT_BEGIN, "LYNX_PARENT": str(os.getpid())}]
    assert "nobody" not in asked[0].get("CXX", "")


def test_a_process_that_nobody_waits_for_ends() -> None:
    process = start("tests.nursery.telling", ["for ever"], dict(os.environ))
    pid = process.pid
    assert process.poll() is None
    del process
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
