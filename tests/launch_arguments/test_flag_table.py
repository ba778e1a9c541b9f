"""The recorded flags: complete, judged, and as Megatron's own parser has them where a checkout is at hand."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lynx.launch_arguments import flag_kinds
from megatron_lynx.launch_arguments.flag_kinds import kind_of
from megatron_lynx.launch_arguments.flag_table import flag_table

ROOT = Path(__file__).parents[2]


def test_every_recorded_flag_is_judged() -> None:
    assert [flag.options for flag in flag_table().flags if kind_of(flag) is None] == []


def test_every_judgement_is_about_a_flag() -> None:
    names = {flag.sets for flag in flag_table().flags}
    judged = [
        *flag_kinds.READ,
        *flag_kinds.REFUSED,
        *flag_kinds.PRICED_AS,
        *(name for names in flag_kinds.NO_MATTER.values() for name in names),
    ]
    assert sorted(name for name in judged if name not in names) == []
    assert len(judged) == len(set(judged)), "each is judged once"


def test_four_releases() -> None:
    table = flag_table()
    assert table.releases == ("0.16", "0.17", "0.18", "0.19")
    assert table.releases_of("--num-layers") == table.releases
    assert table.releases_of("--step-batch-size-schedule") == ("0.18", "0.19")
    for release in table.releases:
        assert sum(release in flag.releases for flag in table.flags) > 650


needs_checkout = pytest.mark.skipif(
    not os.environ.get("MEGATRON_LM_DIR"), reason="needs a checkout of Megatron-LM, 0.16 to 0.19, in MEGATRON_LM_DIR"
)


@needs_checkout
def test_flags_are_those_of_megatrons_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import record_flags

    checkout = Path(os.environ["MEGATRON_LM_DIR"])
    info = runpy.run_path(str(checkout / "megatron/core/package_info.py"))
    release = f"{info['MAJOR']}.{info['MINOR']}"
    rows = json.loads(record_flags.TABLE.read_text(encoding="utf-8"))["flags"]
    recorded = [{key: row[key] for key in row if key != "releases"} for row in rows if release in row["releases"]]
    found = record_flags.flags_of(checkout)
    assert sorted(found, key=str) == sorted(recorded, key=str)


@needs_checkout
def test_examples_are_read_as_megatron_reads_them() -> None:
    command = [sys.executable, "scripts/check_examples.py", os.environ["MEGATRON_LM_DIR"]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
