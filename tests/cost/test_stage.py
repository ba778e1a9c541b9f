"""Worked examples: memory of two layers, windows of a half, a step of two stages."""

from __future__ import annotations

import pytest

from megatron_lynx.anatomy import ATTENTION, MLP
from megatron_lynx.cost.communication import gather_once_s, window_lengths_s
from megatron_lynx.cost.in_flight import microbatches_in_flight
from megatron_lynx.cost.memory import HalfMemory, peak_bytes
from megatron_lynx.cost.stage import Phases, StageSeconds, phases_of, step_s
from megatron_lynx.testbed.tiny_jobs import tiny_job
from tests.profiler.made_up import made_up_profile

SMALL = HalfMemory(resident=10, regenerated=5, tail=12)
LARGE = HalfMemory(resident=10, regenerated=40, tail=12)
LARGE_AHEAD = HalfMemory(resident=10, regenerated=40, tail=12, ahead=40)


def test_peak_without_a_replay_is_what_all_hold():
    kept = HalfMemory(resident=50, regenerated=0, tail=12)
    assert peak_bytes([kept] * 4, in_flight=1) == 200
    assert peak_bytes([kept] * 4, in_flight=3) == 600


def test_peak_is_where_the_largest_half_is_whole():
    assert peak_bytes([SMALL, LARGE], in_flight=1) == 50  # the first one is gone: 10 + 40
    assert peak_bytes([LARGE, SMALL], in_flight=1) == 60  # 10 + 40, and the other's 10
    assert peak_bytes([LARGE, SMALL], in_flight=2) == 80


def test_a_half_regenerated_ahead_meets_what_the_one_before_still_needs():
    assert peak_bytes([SMALL, LARGE_AHEAD], in_flight=1) == 10 + 12 + 40


def test_what_is_regenerated_early_is_held_once_until_its_backward():
    early = HalfMemory(resident=10, regenerated=40, tail=12, early=40)
    assert peak_bytes([SMALL, early], in_flight=1) == 10 + 5 + 10 + 40
    assert peak_bytes([early, early], in_flight=1) == 2 * 50
    assert peak_bytes([early, early], in_flight=3) == 2 * 50 + 2 * 20


def test_what_is_offloaded_counts_for_less_than_a_micro_batch():
    assert peak_bytes([LARGE, SMALL], in_flight=2.5) == 60 + 30


def test_the_loss_is_there_before_backward_begins_and_no_longer():
    assert peak_bytes([SMALL, LARGE], in_flight=1, loss_bytes=25) == 50, "10 + 10 + 25 is less than 10 + 40"
    assert peak_bytes([SMALL, LARGE], in_flight=1, loss_bytes=35) == 10 + 10 + 35


def test_keeping_the_first_half_of_a_backward_costs_nothing_at_the_peak():
    kept = HalfMemory(resident=LARGE.whole, regenerated=0, tail=12)
    assert peak_bytes([kept, SMALL, SMALL], in_flight=1) == peak_bytes([LARGE, SMALL, SMALL], in_flight=1)
    assert peak_bytes([kept, SMALL, SMALL], in_flight=2) > peak_bytes([LARGE, SMALL, SMALL], in_flight=2)


def windows(link_s, passing, **layout):
    job = tiny_job(**layout)
    profile = made_up_profile(job, link_s)
    gemm_s = profile.mlp.items["linear_fc1"].dgrad_s
    message = job.model.seq * job.batch.micro * job.model.hidden * job.model.element_bytes
    return window_lengths_s(profile, passing, MLP, message), gemm_s


def test_windows_are_what_stock_does_not_hide():
    lengths, gemm_s = windows(1.0, "bwd", tensor=2)
    assert lengths == (1.0 - gemm_s,)
    assert windows(1.0, "fwd", tensor=2)[0] == (1.0,)
    lengths, gemm_s = windows(1.0, "bwd", tensor=2, sequence_parallel=True)
    assert lengths == (1.0, 1.0 - gemm_s, 1.0 - gemm_s)
    assert windows(1.0, "fwd", tensor=2, sequence_parallel=True)[0] == (1.0, 1.0)


def test_a_link_faster_than_its_gemm_leaves_no_window():
    assert windows(1e-9, "bwd", tensor=2)[0] == (0.0,)
    assert windows(1.0, "bwd", tensor=1)[0] == ()


def test_a_gather_in_time_costs_nothing_and_one_on_demand_what_stock_had_hidden():
    profile = made_up_profile(tiny_job(tensor=2, sequence_parallel=True), link_s=1e-9)
    message = profile.links[0].bytes
    assert gather_once_s(profile, ATTENTION, MLP, message) == 0
    assert gather_once_s(profile, MLP, None, message) == pytest.approx(1e-9)


def test_a_step_of_two_stages():
    """The slowest stage paces all micro-batches but the first; each brings an exchange, for which both sides wait."""
    stages = [StageSeconds(1.0, 2.0), StageSeconds(1.5, 2.5)]
    assert step_s(stages, microbatches=1, p2p_s=0.25) == 3.0 + 4.0 + 2 * 0.25
    assert step_s(stages, microbatches=4, p2p_s=0.25) == 3 * (4.0 + 0.25) + 3.0 + 4.0 + 2 * 0.25
    assert step_s(stages[:1], microbatches=4, p2p_s=0.25) == 12.0


def test_phases_and_micro_batches_in_flight():
    job = tiny_job(pipeline=4, microbatches=6)
    assert [phases_of(job, stage) for stage in range(4)] == [Phases(3, 3), Phases(4, 2), Phases(5, 1), Phases(6, 0)]
    assert [microbatches_in_flight(job, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert microbatches_in_flight(tiny_job(pipeline=4, microbatches=2), 0) == 2
