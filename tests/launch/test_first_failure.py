"""A rank that fails while others wait for it ends the whole job, with one message: torchrun ends the ranks that are left."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_lynx.launch.ending import FirstFailure
from tests.hurry import skip_in_a_hurry
from tests.long import long
from tests.nursery import process as nursery

ROOT = Path(__file__).parents[2]
RANKS = 4


@pytest.mark.parametrize(
    ("failure", "speakers", "says"),
    [
        ("error", "1,0,2", "this cannot go on\n  - memory: found none, needed some\n"),
        ("memory", "0", "megatron-lynx: rank 0: out of device memory in step 1\n"),
        ("kill", "1", "Signal 9 (SIGKILL) received by PID"),
        *long(
            ("error", "1", "megatron-lynx: rank 1: this cannot go on\n  - memory: found none, needed some\n"),
            ("memory", "1,3", "out of device memory in step 1\n"),
        ),
    ],
)
def test_every_rank_ends_and_one_message_is_seen(tmp_path: Path, failure: str, speakers: str, says: str) -> None:
    """Ranks wait in a collective that notices nothing for minutes."""
    skip_in_a_hurry()
    arguments = ["--standalone", f"--nproc-per-node={RANKS}", "-m", "tests.launch.waiting_rank", str(tmp_path), speakers, failure]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    ended = nursery.run("tests.launch.torchrun", *arguments, environment=environment, timeout=85)
    text = ended.stdout + ended.stderr
    assert ended.returncode == 1, text
    assert text.count(says) == 1, text
    assert text.count("megatron-lynx: ") <= len(speakers.split(",")), text
    assert "left waiting" not in text
    assert [rank for rank in range(RANKS) if Path(f"/proc/{(tmp_path / str(rank)).read_text()}").exists()] == []


def test_a_rank_that_fails_because_another_one_is_gone_is_silent() -> None:
    for follows in (True, False):
        ended = nursery.run("tests.launch.left_rank", *(["after another"] if follows else []), timeout=80)
        assert ended.returncode == 1
        assert ("Connection closed by peer" in ended.stderr) is not follows


def test_a_rank_that_fails_behind_the_one_that_hosts_the_store_is_not_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ran out of memory at the same time; the first left at once, and the second explained it all once more."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = int(listening.getsockname()[1])
    host = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    failure = FirstFailure()
    failure._store = dist.TCPStore("127.0.0.1", port, is_master=False)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    del host
    assert not failure.is_first()
