"""Bytes are compared without tolerance: every expected figure follows from shapes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress

import pytest
import torch

from megatron_lynx.measure.memory import activation_meter, nothing_reported, remember_blocks
from megatron_lynx.units import MIB
from tests.instruments.cpu_total import CpuTotal
from tests.instruments.process_peak import ENVIRONMENT, why_unavailable

KIB4 = 4096
FLOATS = KIB4 // 4


def test_counts_what_is_live_and_the_most_that_was():
    with activation_meter("cpu") as meter:
        first = torch.empty(FLOATS)
        second = torch.empty(2 * FLOATS)
        meter.mark("both")
        del first
        meter.mark("second")
        third = torch.empty(FLOATS // 2)  # fits where the first was: no new peak
        meter.mark("second and third")
    assert [mark.bytes for mark in meter.use.marks] == [3 * KIB4, 2 * KIB4, 2.5 * KIB4]
    assert meter.use.peak_bytes == meter.use.resident_bytes == meter.use.at("both") == 3 * KIB4
    assert meter.use.left_bytes == second.nbytes + third.nbytes


def test_a_peak_between_two_marks_is_seen():
    with activation_meter("cpu") as meter:
        meter.mark("before")
        torch.empty(FLOATS)
        meter.mark("after")
    assert (meter.use.peak_bytes, meter.use.resident_bytes, meter.use.left_bytes) == (KIB4, 0, 0)


def test_views_do_not_count_and_storages_do():
    with activation_meter("cpu") as meter:
        base = torch.empty(FLOATS)
        views = base[:10], base.view(2, -1), base.detach()
        del base
        meter.mark("only views are left")
    assert meter.use.at("only views are left") == views[0].untyped_storage().nbytes() == KIB4


def test_releases_of_what_is_older_than_the_meter_lower_the_level():
    remember_blocks()
    old = [torch.empty(3 * FLOATS)]
    with activation_meter("cpu") as meter:
        old.clear()
        meter.mark("freed")
        new = torch.empty(FLOATS)
        meter.mark("less than before")
    assert [mark.bytes for mark in meter.use.marks] == [-3 * KIB4, -2 * KIB4]
    assert meter.use.peak_bytes == 0
    assert meter.use.left_bytes == -2 * KIB4
    assert new.nbytes == KIB4


def test_saved_tensors_of_a_graph_and_their_release_by_backward():
    x = torch.randn(FLOATS, requires_grad=True)
    x.grad = torch.zeros_like(x)
    with activation_meter("cpu") as meter:
        loss = x.sin().exp().sum()  # sin saves x (old), exp saves its own output, sum saves nothing: sin(x) is let go
        meter.mark("after forward")
        loss.backward()
        meter.mark("after backward")
    scalar = 4
    assert meter.use.at("after forward") == KIB4 + scalar
    # sin's backward: the gradient of its output, cos(x) and their product; exp's output is gone by then
    assert meter.use.peak_bytes == 3 * KIB4 + 2 * scalar  # the loss and the gradient that backward starts from
    assert meter.use.at("after backward") == scalar


class _BackwardInsideBackward(torch.autograd.Function):
    """Stock checkpointing's shape: its backward runs a backward of its own. Deep nesting moves it to autograd's own threads."""

    @staticmethod
    def forward(ctx, x, depth):
        ctx.save_for_backward(x)
        ctx.depth = depth
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        THREADS.add(threading.get_ident())
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            inner = (_BackwardInsideBackward.apply(y, ctx.depth - 1) if ctx.depth else y * 2).sum()
        if not ctx.depth:
            HELD.append(torch.empty(100 * FLOATS))
            HELD.clear()
        inner.backward()
        return grad, None


THREADS: set[int] = set()
HELD: list[torch.Tensor] = []


def test_autograd_on_its_own_threads_is_counted():
    THREADS.clear()
    x = torch.zeros(1, requires_grad=True)
    with activation_meter("cpu") as meter:
        _BackwardInsideBackward.apply(x, 80).sum().backward()
    assert len(THREADS) > 1, "autograd stayed on one thread: nest deeper"
    assert 100 * KIB4 <= meter.use.peak_bytes < 110 * KIB4


def test_what_another_thread_keeps_and_frees_is_in_the_total():
    mine, theirs = [torch.empty(FLOATS)], []
    remember_blocks()
    with activation_meter("cpu") as meter:
        mine.append(torch.empty(FLOATS))

        def work():
            theirs.append(torch.empty(5 * FLOATS))
            mine.pop()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        meter.mark("joined")
    assert meter.use.at("joined") == meter.use.left_bytes == 5 * KIB4


def test_a_block_that_was_freed_uncounted_is_not_taken_for_a_later_one():
    """Two profiler sessions with work in between: without the allocator's flag, an address of the first session that was reused
    in between was freed with its *old* size in the second one."""
    with activation_meter("cpu"):
        kept = torch.empty(FLOATS)
    for floats in (FLOATS, FLOATS - 64, FLOATS - 128):
        del kept
        kept = torch.empty(floats)
    with activation_meter("cpu") as meter:
        freed = kept.nbytes
        del kept
    assert meter.use.left_bytes == -freed


def test_an_exception_passes_and_the_next_meter_works():
    with pytest.raises(KeyError), activation_meter("cpu"):
        raise KeyError("step failed")
    with activation_meter("cpu") as meter:
        torch.empty(FLOATS)
    assert meter.use.peak_bytes == KIB4


def test_nothing_is_printed(capfd):
    """Neither Kineto's lines when a profiler starts and stops, nor the allocator's about a block it does not know."""
    old = torch.empty(FLOATS)
    with activation_meter("cpu"):
        del old
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_allocator_statistics():
    block = 4 * MIB
    with activation_meter("cuda") as meter:
        kept = torch.empty(block, dtype=torch.uint8, device="cuda")
        torch.empty(block, dtype=torch.uint8, device="cuda")
        meter.mark("one left")
    assert meter.use.peak_bytes == 2 * block
    assert meter.use.at("one left") == kept.nbytes == meter.use.left_bytes


needs_high_water_mark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))


STEPS = """
import torch
from tests.instruments.process_peak import counted_and_grown

for rows, width, depth in ((16 * 1024, 1024, 3), (1024, 256, 40)):
    weight = torch.randn(width, width, requires_grad=True)

    def step():
        hidden = torch.ones(rows, width)
        for _ in range(depth):
            hidden = torch.relu(hidden @ weight)
        hidden.sum().backward()
        weight.grad = None

    counted_bytes, grown_bytes = counted_and_grown(step)
    print(counted_bytes > depth * rows * width * 4, counted_bytes, grown_bytes)
"""


@needs_high_water_mark
@pytest.mark.long
def test_counter_agrees_with_the_process_peak():
    """Tensors of 64 MiB, then of 1 MiB, which once took twice their size: glibc's heap did not reuse freed aligned blocks."""
    run = subprocess.run(
        [sys.executable, "-c", STEPS], env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")
    steps = [line.split() for line in run.stdout.splitlines()]
    assert [enough for enough, _, _ in steps] == ["True", "True"], run.stdout
    for _, counted_bytes, process_bytes in steps:  # 4 MiB: what a step's small blocks and workspaces come to
        assert abs(int(process_bytes) - int(counted_bytes)) <= 0.05 * int(counted_bytes) + 4 * MIB


def test_the_allocators_total_is_what_its_profiler_counts():
    total = CpuTotal()
    before = total.bytes
    with activation_meter("cpu") as meter:
        held = torch.ones(12_345)
        meter.mark("held")
        assert total.bytes - before >= held.nbytes
    assert meter.use.at("held") == total.bytes - before == held.nbytes
    del held
    assert total.bytes == before


def test_what_kineto_reports_is_not_seen_and_standard_error_is_back_after_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with suppress(ZeroDivisionError), nothing_reported():
        print(1 / os.write(2, b"inside") / 0)
    os.write(2, b"after")
    assert capfd.readouterr().err == "after"
