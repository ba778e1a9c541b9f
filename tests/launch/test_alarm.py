"""A rank that waits for one that cannot go on is ended, whoever started them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_lynx.launch.alarm import LastWord
from tests.hurry import skip_in_a_hurry
from tests.nursery.process import start

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
    skip_in_a_hurry()
    rendezvous = f"file://{tmp_path / 'store'}" if store == "file" else f"tcp://127.0.0.1:{free_port()}"
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    started = []
    try:
        for rank in range(ranks):
            arguments = [str(rank), str(ranks), rendezvous, speakers, str(late_s)]
            with open(tmp_path / f"said by {rank}", "w") as said:
                started.append(start("tests.launch.waiting_rank", arguments, environment, said.fileno()))
        for one in started:
            one.wait(120)
    finally:
        for one in started:
            one.kill()
    text = "".join((tmp_path / f"said by {rank}").read_text() for rank in range(ranks))
    spoke = {one.returncode for rank, one in enumerate(started) if str(rank) in speakers}
    followed = {one.returncode for rank, one in enumerate(started) if str(rank) not in speakers}
    assert (spoke | {1}, followed) == ({1, 2}, {1}), text  # a second one that is slow to speak may hear the bell first
    assert text.count("this cannot go on\n  - memory: found none, needed some\n") == 1, text
    assert "Traceback" not in text
    assert "left waiting" not in text


def test_a_rank_that_fails_behind_the_one_that_hosts_the_store_is_not_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ran out of memory at the same time; the first left at once, and the second explained it all once more."""
    port = free_port()
    host = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    word = LastWord()
    word._store = dist.TCPStore("127.0.0.1", port, is_master=False)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    del host
    assert not word.is_first()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])
