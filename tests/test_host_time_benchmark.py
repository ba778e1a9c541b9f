"""`benchmarks.host_time --json` says on which machine, and repeats every row."""

from __future__ import annotations

import json
from dataclasses import asdict

from benchmarks.host_time import Row, as_json


def test_its_json_names_the_machine_and_all_rows() -> None:
    row = Row("local", "one rank", "recomputes norms", 1.5, 0.9, 1.2, 0.5, 0.3, 1.05)
    said = json.loads(as_json([row], layers=16, rounds=9))
    assert said["rows"] == [asdict(row)]
    assert (said["layers"], said["rounds"]) == (16, 9)
    assert said["machine"]["cores"] >= 1
    assert said["machine"]["links"]["kind"] == "loopback"
