"""`benchmarks.instructions` says what it needs, and counts settings that a job can have."""

from __future__ import annotations

import shutil
import sys

import pytest

from benchmarks.instructions import main, settings


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    monkeypatch.setattr(sys, "argv", ["instructions"])
    with pytest.raises(SystemExit, match="needs valgrind and cc on the path"):
        main()


@pytest.mark.parametrize("offloading", [False, True])
def test_every_setting_begins_with_stock_none(offloading: bool) -> None:
    job, candidates = settings("local", offloading=offloading)
    first, *others = candidates.values()
    assert first.plan is None
    assert [each.plan for each in others if each.plan is not None]
    assert job.parallel.pipeline == (2 if offloading else 1)
