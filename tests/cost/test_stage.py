"""Worked examples: memory of two layers, windows of a half, a step of two stages."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_lynx.anatomy import ATTENTION, MLP
from megatron_lynx.config.loader import load_cluster
from megatron_lynx.cost.communication import (
    _carried_bytes,
    behind_gather_s,
    gather_lost_and_spared_s,
    head_of,
    window_lengths_s,
)
from megatron_lynx.cost.memory import HalfMemory, held_at_moments, peak_bytes, smallest_offloaded_bytes
from megatron_lynx.cost.stage import chunks_in_flight, cooldown_backwards, microbatches_in_flight
from megatron_lynx.profiler.profile import BlockProfile
from megatron_lynx.schedule.flushes import with_flushes
from megatron_lynx.units import MIB
from tests.profiler.made_up import made_up_profile
from tests.schedule.orders import most_in_flight
from tests.tiny_jobs import tiny_job

SMALL = HalfMemory(resident=10, regenerated=5, tail=12)
LARGE = HalfMemory(resident=10, regenerated=40, tail=12)
LARGE_AHEAD = HalfMemory(resident=10, regenerated=40, tail=12, ahead=(40, 0, 0, 0))


def test_peak_without_a_recomputation_is_what_all_hold():
    kept = HalfMemory(resident=50, regenerated=0, tail=12)
    assert peak_bytes([kept] * 4, in_flight=1) == 200
    assert peak_bytes([kept] * 4, in_flight=3) == 600


def test_peak_is_where_the_largest_half_is_whole():
    assert peak_bytes([SMALL, LARGE], in_flight=1) == 50  # the first one is gone: 10 + 40
    assert peak_bytes([LARGE, SMALL], in_flight=1) == 60  # 10 + 40, and the other's 10
    assert peak_bytes([LARGE, SMALL], in_flight=2) == 80


def test_a_half_regenerated_ahead_meets_what_the_one_before_still_needs():
    assert peak_bytes([SMALL, LARGE_AHEAD], in_flight=1) == 10 + 12 + 40


@pytest.mark.parametrize(("moments", "peak"), [(4, 10 + 100 + 20), (3, 100 + 20), (2, 10 + 100 + 10), (1, 100 + 10)])
def test_what_is_there_ahead_of_time_meets_the_halves_before(moments, peak):
    """Of the third half: while the first begins, while it ends, while the second begins, while it ends."""
    first, second, third, fourth = (100 * (before == moments) for before in (1, 2, 3, 4))
    ahead = HalfMemory(resident=10, regenerated=0, tail=0, ahead=(first, second, third, fourth))
    assert peak_bytes([HalfMemory(10, 0, 0), HalfMemory(10, 0, 0), ahead], in_flight=1) == peak


def test_a_table_of_answers_says_what_each_of_them_holds_alone():
    """And what halves hold at a moment is what each of them adds to it."""
    some, late = HalfMemory(10, 40, 12), HalfMemory(20, 70, 15, ahead=(70, 60, 50, 40))
    answers = [[SMALL, LARGE, late, some], [late, late, late, late], [some, late, SMALL, LARGE_AHEAD]]
    table = np.array([[half.columns for half in answer] for answer in answers])
    held = held_at_moments(table)
    assert held.shape == (3, 9)
    assert list(held.max(axis=-1)) == [peak_bytes(answer, in_flight=1) for answer in answers]
    alone = [np.where(np.arange(4)[:, None] == half, table, 0) for half in range(4)]
    assert (sum(map(held_at_moments, alone)) == held).all()


def test_large_blocks_may_go_to_the_host_and_in_small_layers_smaller_ones():
    assert [smallest_offloaded_bytes(size) for size in (64 * MIB, 4 * MIB, MIB)] == [MIB, MIB, MIB // 4]


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
    assert gather_lost_and_spared_s(profile, ATTENTION, MLP, message)[0] == 0
    assert gather_lost_and_spared_s(profile, MLP, None, message)[0] == pytest.approx(1e-9)


def test_phases_and_micro_batches_in_flight():
    job = tiny_job(pipeline=4, microbatches=6)
    assert [cooldown_backwards(job, stage) for stage in range(4)] == [3, 2, 1, 0]
    assert [microbatches_in_flight(job, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert microbatches_in_flight(tiny_job(pipeline=4, microbatches=2), 0) == 2


def with_links(link_s, **layout):
    """Sequence parallelism, and every collective takes so long; with the bytes of a message."""
    job = tiny_job(tensor=2, sequence_parallel=True, **layout)
    profile = made_up_profile(job, link_s)
    return profile, profile.message_bytes


def test_an_early_gather_spares_the_backward_what_its_own_would_have_exposed():
    """The backward of the half before hides it whole; the own dgrad would have hidden a part."""
    dgrad_s = with_links(1.0)[0].attention.items["linear_qkv"].dgrad_s
    behind_s = behind_gather_s(with_links(1.0)[0], MLP, whole=True)
    assert dgrad_s < behind_s
    gather_s = (dgrad_s + behind_s) / 2
    profile, message = with_links(gather_s)
    lost_s, spared_s = gather_lost_and_spared_s(profile, ATTENTION, MLP, message, whole=True)
    assert (lost_s, spared_s) == (0.0, pytest.approx(gather_s - dgrad_s))


def test_the_head_waits_for_both_its_collectives_behind_a_third_of_its_backward():
    profile, message = with_links(1e-3)
    head = BlockProfile(forward_s=2e-3, backward_s=1.5e-3, saved_bytes=0)
    profile = profile.model_copy(update={"head": head})
    found = head_of(profile, message)
    assert found.forward_s == pytest.approx(2e-3 + 1e-3)
    assert found.backward_s == pytest.approx(1.5e-3 + 2 * (1e-3 - 0.5e-3))


@pytest.mark.parametrize(("fp8", "part"), [(None, 2), ("delayed", 1), ("tensorwise", 1), ("mxfp8", 2), ("nvfp4", 1.125)])
def test_a_gradient_with_block_scales_is_gathered_by_rows_and_by_columns(fp8, part):
    """In halves of a BF16 message."""
    profile, message = with_links(1e-3)
    profile = profile.model_copy(update={"shape": profile.shape.model_copy(update={"fp8": fp8})})
    [gradient] = [one for one in MLP.collectives("bwd", True) if one.carries == "gradient" and one.kind == "all_gather"]
    assert _carried_bytes(profile, MLP, gradient, message) == part * message // 2


def test_linears_in_fp4_compute_at_their_own_rate():
    """And in FP8 at that of FP8, whatever a cluster says of FP4."""
    units = load_cluster("b200-180g", "cluster").fp8
    assert units is not None
    assert (units.peak_of("mxfp8"), units.peak_of("nvfp4")) == (4500, 9000)
    assert units.taken == (*units.recipes, "nvfp4")


def test_chunks_in_flight_are_those_of_the_schedule():
    """Four stages of two chunks, in groups of four: as counted in the order that runs."""
    job = tiny_job(layers=8, pipeline=4, layers_per_chunk=1, microbatches=8)
    counts = [chunks_in_flight(job, stage) for stage in range(4)]
    assert counts == [11, 9, 7, 5]
    assert counts == [most_in_flight(order) for order in with_flushes(4, 8, 2).orders]
