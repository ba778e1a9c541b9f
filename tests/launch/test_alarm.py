"""A rank that waits for one that cannot go on is ended, whoever started them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize(("store", "ranks", "speakers"), [("file", 3, "1,2"), ("tcp", 4, "1,0"), ("tcp", 4, "0")])
def test_nobody_is_left_waiting(tmp_path: Path, store: str, ranks: int, speakers: str) -> None:
    """Without torchrun, which ends all ranks when one is gone. Over TCP rank 0 hosts the store: it was the second to speak, left
    at once, and nobody heard the bell any more."""
    all_end(tmp_path, store, ranks, speakers)


def test_who_rings_waits_for_those_who_are_late(tmp_path: Path) -> None:
    """Its own watcher heard the bell, and ended it with another status."""
    all_end(tmp_path, "file", 3, "0", late_s=4)


def all_end(tmp_path: Path, store: str, ranks: int, speakers: str, late_s: float = 0) -> None:
    rendezvous = f"file://{tmp_path / 'store'}" if store == "file" else f"tcp://127.0.0.1:{free_port()}"
    command = [sys.executable, str(HERE / "waiting_rank.py")]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    started: list[subprocess.Popen[str]] = []
    try:
        for rank in range(ranks):
            arguments = [*command, str(rank), str(ranks), rendezvous, speakers, str(late_s)]
            started.append(subprocess.Popen(arguments, env=environment, stdout=-1, stderr=-2, text=True))
        said = [rank.communicate(timeout=120)[0] for rank in started]
    finally:
        for rank_started in started:
            rank_started.kill()
            rank_started.wait()
    text = "".join(said)
    spoke = {one.returncode for rank, one in enumerate(started) if str(rank) in speakers}
    followed = {one.returncode for rank, one in enumerate(started) if str(rank) not in speakers}
    assert (spoke | {1}, followed) == ({1, 2}, {1}), text  # a second one that is slow to speak may hear the bell first
    assert text.count("this cannot go on\n  - memory: found none, needed some\n") == 1, text
    assert "Traceback" not in text
    assert "left waiting" not in text


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])
