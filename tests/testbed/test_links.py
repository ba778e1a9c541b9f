"""A shaped link is as slow as it says; without the means there is loopback and a sentence."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from megatron_lynx.testbed import links
from megatron_lynx.testbed.links import Loopback, shaped_hosts
from megatron_lynx.testbed.ranks import RankError, RankPool

from . import on_ranks


@pytest.fixture
def hosts():
    with shaped_hosts(50) as made:
        if not made.shaped:
            pytest.skip(made.description)
        yield made


def test_shaped_rate_is_what_a_collective_gets(hosts):
    """An all-reduce over two ranks sends its size once in each direction; a lower bound on its time holds on any machine."""
    size_bytes = 2_000_000
    with RankPool(2, links=hosts) as ranks:
        for rate_mbit in (50, 100):
            hosts.set_rate(rate_mbit)
            assert slowest_s(ranks, size_bytes) > 0.8 * size_bytes * 8 / (rate_mbit * 1e6)
            assert f"{rate_mbit} Mbit/s" in hosts.description


def slowest_s(ranks, size_bytes):
    """Gloo was seen once to find the other host's port closed while both came up: it is asked a second time then."""
    try:
        return max(ranks.run(on_ranks.all_reduce_seconds, size_bytes))
    except RankError as error:
        if "connectFullMesh" not in str(error):
            raise
        return max(ranks.run(on_ranks.all_reduce_seconds, size_bytes))


def test_hosts_are_not_seen_from_this_machine(hosts):
    """No named namespace and no interface here, neither while they exist nor after."""
    seen = [subprocess.run(["ip", *what], capture_output=True, text=True, check=True).stdout for what in (["netns"], ["link"])]
    assert "lynx" not in "".join(seen)
    descriptors = len(os.listdir("/proc/self/fd"))
    hosts.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors - 2


def test_loopback_with_the_reason_where_a_tool_is_missing(monkeypatch):
    monkeypatch.setattr(links.shutil, "which", lambda tool: None if tool == "tc" else shutil.which.__name__)
    fallback = shaped_hosts(100)
    assert not fallback.shaped
    assert "loopback" in fallback.description
    assert "needs tc, not found" in fallback.description


@pytest.mark.parametrize("gone_at_once", [False, True])
def test_loopback_with_the_reason_where_namespaces_are_forbidden(monkeypatch, tmp_path, gone_at_once):
    """Where `unshare` had ended before it was asked anything, the reason was a broken pipe."""
    refusing = tmp_path / "unshare"
    refusing.write_text("#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2\nexit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    if gone_at_once:
        monkeypatch.setattr(links.subprocess, "Popen", Ended)
    fallback = shaped_hosts(100)
    assert isinstance(fallback, Loopback)
    assert "Operation not permitted" in fallback.description
    assert "root" in fallback.description


class Ended(subprocess.Popen):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.wait()


def test_rate_must_be_positive():
    with pytest.raises(ValueError, match="found 0"):
        shaped_hosts(0)
