"""The recorded flags: complete, judged, and as Megatron's own parser has them where a checkout is at hand."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_lynx.launch_arguments.given import flag_table

ROOT = Path(__file__).parents[2]


def test_every_recorded_flag_is_judged() -> None:
    assert [flag.options for flag in flag_table().flags if flag.kind is None] == []


def test_a_flag_is_judged_alike_in_all_its_forms() -> None:
    kinds: dict[str, set[object]] = {}
    for flag in flag_table().flags:
        kinds.setdefault(flag.sets, set()).add(flag.kind)
    assert [name for name, found in kinds.items() if len(found) > 1] == []


def test_recording_again_keeps_what_was_written_by_hand(record_flags: Any) -> None:
    """A release with a flag less, a flag more, and a flag that takes other words."""
    before = json.loads(record_flags.TABLE.read_text(encoding="utf-8"))
    rows = [{key: row[key] for key in row if key not in ("kind", "why", "releases")} for row in before["flags"]]
    rows = [row for row in rows if row["sets"] != "lr"]
    rows += [{**rows[0], "options": ["--of-tomorrow"], "sets": "of_tomorrow"}]
    table = record_flags.with_judgements(record_flags.merged({"0.20": rows}), before)
    judged = {row["sets"]: (row.get("kind"), row.get("why")) for row in before["flags"]}
    assert table["releases"] == ["0.20"]
    assert {row["sets"]: (row.get("kind"), row.get("why")) for row in table["flags"]} == {
        **{name: judged[name] for name in judged if name != "lr"},
        "of_tomorrow": (None, None),
    }
    assert record_flags.not_judged(table) == ["of_tomorrow"]
    assert {key: before[key] for key in before if key not in ("releases", "flags")}.items() <= table.items()
    assert json.loads(record_flags.as_text(table)) == table


def test_the_recorded_table_is_written_as_the_script_writes_it(record_flags: Any) -> None:
    text = record_flags.TABLE.read_text(encoding="utf-8")
    assert record_flags.as_text(json.loads(text)) == text


@pytest.fixture
def record_flags(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("record_flags")


def test_the_releases() -> None:
    table = flag_table()
    assert table.releases == ("0.16", "0.17", "0.18", "0.19", "0.20")
    assert table.releases_of("--num-layers") == table.releases
    assert table.releases_of("--step-batch-size-schedule") == ("0.18", "0.19", "0.20")
    for release in table.releases:
        assert sum(release in flag.releases for flag in table.flags) > 650


needs_checkout = pytest.mark.skipif(
    not os.environ.get("MEGATRON_LM_DIR"), reason="needs a checkout of Megatron-LM, 0.16 to 0.19, in MEGATRON_LM_DIR"
)


@needs_checkout
def test_flags_are_those_of_megatrons_parser(record_flags: Any) -> None:
    checkout = Path(os.environ["MEGATRON_LM_DIR"])
    info = runpy.run_path(str(checkout / "megatron/core/package_info.py"))
    release = f"{info['MAJOR']}.{info['MINOR']}"
    rows = json.loads(record_flags.TABLE.read_text(encoding="utf-8"))["flags"]
    ours = ("releases", *record_flags.JUDGED)
    recorded = [{key: row[key] for key in row if key not in ours} for row in rows if release in row["releases"]]
    found = record_flags.flags_of(checkout)
    assert sorted(found, key=str) == sorted(recorded, key=str)


@needs_checkout
def test_examples_are_read_as_megatron_reads_them() -> None:
    command = [sys.executable, "scripts/check_examples.py", os.environ["MEGATRON_LM_DIR"]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
