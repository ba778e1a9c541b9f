"""A rank that waits for one that cannot go on is ended, whoever started them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_nobody_is_left_waiting(tmp_path):
    """Without torchrun, which ends all ranks when one is gone."""
    command = [sys.executable, HERE / "waiting_rank.py"]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    ranks = [
        subprocess.Popen([*map(str, command), str(rank), tmp_path], env=environment, stdout=-1, stderr=-2, text=True)
        for rank in range(3)
    ]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1, 1]
    text = "".join(said)
    assert text.count("this cannot go on\n  - memory: found none, needed some\n") == 1, text
    assert "Traceback" not in text
    assert "left waiting" not in text
