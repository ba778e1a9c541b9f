"""Blocks of exact sizes, lent again and again."""

from __future__ import annotations

import logging

import pytest
import torch

from megatron_lynx.errors import OffloadError
from megatron_lynx.runtime.device import CpuDevice
from megatron_lynx.runtime.offload.copier import Copier, Owner
from megatron_lynx.runtime.offload.host_memory import ALIGNMENT, HostLimit, HostPool, Slab
from megatron_lynx.runtime.trace import Trace
from tests.runtime.devices import CPU


def pool(*, limit_bytes: int = 10**6, sets: int = 1) -> HostPool:
    return HostPool("stage 1", CPU, HostLimit(limit_bytes), sets)


def test_blocks_have_the_sizes_asked_for_and_do_not_overlap() -> None:
    """Nothing is rounded up to powers of two, as PyTorch's own page-locked allocator does; blocks begin at multiples of 256."""
    lender, sizes = pool(sets=2), [3000, 100, 5000]
    blocks = lender.lend(sizes)
    for number, block in enumerate(blocks):
        block.tensor.fill_(number)
    assert [block.tensor.nbytes for block in blocks] == sizes
    assert [set(block.tensor.tolist()) for block in blocks] == [{0}, {1}, {2}]
    assert lender.bytes == 2 * sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)


def test_best_fit() -> None:
    lender = pool()
    lender.lend([4096, 1024, 2048])
    assert [block.tensor.nbytes for block in lender.lend([900, 2000])] == [1024, 2048]


def test_best_fit_where_a_size_is_asked_for_more_often_than_there_are_blocks_of_it() -> None:
    lender = pool()
    lender.lend([4096, 1024, 1024])
    assert [block.tensor.nbytes for block in lender.lend([1024, 1024, 1000])] == [1024, 1024, 4096]


def test_a_block_keeps_the_shape_in_which_it_was_used() -> None:
    lender, like = pool(), torch.randn(4, 8)
    (block,) = lender.lend([128])
    shaped = block.like(like)
    assert (shaped.dtype, shaped.shape, shaped.data_ptr()) == (like.dtype, like.shape, block.tensor.data_ptr())
    del block
    (again,) = lender.lend([128])
    assert again.like(like) is shaped
    other = again.like(torch.arange(10))
    assert (other.dtype, other.shape, other.data_ptr()) == (torch.int64, (10,), again.tensor.data_ptr())


def test_what_is_given_back_is_lent_again() -> None:
    lender = pool(sets=2)
    addresses = set()
    for _ in range(50):
        blocks = [*lender.lend([512, 1024]), *lender.lend([512, 1024])]
        addresses |= {block.tensor.data_ptr() for block in blocks}
        blocks.clear()
    assert lender.bytes == 2 * (512 + 1024)
    assert len(addresses) == 4


def test_a_block_comes_with_the_copy_that_may_still_read_it() -> None:
    lender, copier = pool(), Copier("reload", CPU, Trace())
    (block,) = lender.lend([64])
    copy = block.last = copier.start([(torch.empty(64, dtype=torch.uint8), block.tensor)], Owner("stage 1", 0))
    del block
    assert lender.lend([64])[0].last is copy
    copier.close()


def test_a_block_whose_copy_failed_breaks_no_other() -> None:
    """What failed is over. The next copy into the block would fail with it, and every step behind that."""
    lender, copier = pool(), Copier("reload", CPU, Trace())
    copier.move = failing
    (block,) = lender.lend([64])
    copy = block.last = copier.start([(torch.empty(64, dtype=torch.uint8), block.tensor)], Owner("stage 1", 0))
    copier.drain()
    assert copy.error is not None
    del block
    assert lender.lend([64])[0].last is None
    copier.close()


def failing(target: torch.Tensor, source: torch.Tensor) -> None:
    raise RuntimeError("a copy failed")


def test_other_sizes_make_another_slab_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    lender = pool(sets=2)
    with caplog.at_level(logging.WARNING):
        old = lender.lend([1024, 512])
        lender.lend([512, 256])
        assert caplog.messages == [], "smaller ones fit into what is there"
        lender.lend([2048, 512])
    assert lender.bytes == 2 * (2048 + 512)
    assert "stage 1: activations have other sizes than before" in caplog.text
    assert "3.00 KiB before, 5.00 KiB now" in caplog.text
    old[0].tensor.fill_(1)  # lent, so still there
    old.clear()
    assert [block.tensor.nbytes for block in lender.lend([1024, 512])] == [2048, 512], "old blocks are not lent again"


def test_memory_is_locked_for_one_micro_batch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it was page-locked at the end of the first forward: seconds, for tens of GB, in which the device idled. What is set
    aside counts from the beginning, so that too little memory is still said at once."""
    locked = list[int]()
    monkeypatch.setattr(CpuDevice, "lock", lambda device, memory: locked.append(memory.nbytes))
    lender, held = pool(sets=3), []
    for number in range(1, 4):
        held.append(lender.lend([1024, 512]))
        assert locked == [1024 + 512] * number
        assert lender.bytes == 3 * (1024 + 512)
    held.pop(0)
    lender.lend([1024, 512])
    assert len(locked) == 3, "what came back is lent again"


def test_one_more_micro_batch_makes_room_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    lender = pool(sets=1)
    with caplog.at_level(logging.WARNING):
        lent = [lender.lend([1024]), lender.lend([1024])]
    assert lender.bytes == 2 * 1024
    assert "one more micro-batch on the host than before" in caplog.text
    del lent


def test_too_little_memory_is_refused_with_both_numbers() -> None:
    lender = pool(limit_bytes=5000, sets=2)
    with pytest.raises(OffloadError) as refused:
        lender.lend([1024, 2048])
    (problem,) = refused.value.problems
    assert problem.where == "stage 1: host memory for offloaded activations"
    assert "5000 bytes" in problem.found
    assert "6144 bytes" in problem.needed
    assert lender.bytes == 0


def test_chunks_share_what_their_rank_may_hold() -> None:
    """Each within the limit, all of them were not: host memory ran out in the middle of training."""
    limit = HostLimit(5000)
    pools = [HostPool(f"stage 1, chunk {chunk}", CPU, limit, sets=1) for chunk in range(2)]
    pools[0].lend([3072])
    with pytest.raises(OffloadError, match=r"5000 bytes .* available to this rank, needed 6144 bytes"):
        pools[1].lend([3072])
    pools[0].lend([4096])
    assert limit.held_bytes == pools[0].bytes == 4096, "what was replaced is not counted twice"
    pools[0].clear()
    assert limit.held_bytes == 0
    pools[1].lend([3072])


def test_what_lent_blocks_keep_pinned_was_forgotten() -> None:
    """Blocks that were replaced by larger ones, and were still lent, counted as given back: the host ran out of memory."""
    limit = HostLimit(10_000)
    lender = HostPool("stage 1", CPU, limit, sets=1)
    old = lender.lend([4096])
    new = lender.lend([5120])
    assert (limit.held_bytes, lender.bytes) == (4096 + 5120, 5120)
    with pytest.raises(OffloadError, match="needed 13312 bytes"):
        HostPool("stage 1, chunk 1", CPU, limit, sets=1).lend([4096])
    old.clear()
    assert limit.held_bytes == 5120
    new.clear()
    lender.clear()
    assert limit.held_bytes == 0


def test_what_was_locked_ahead_is_cut_into_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each micro-batch has a slab of its own; one for which there is none, and blocks of other sizes, are locked later."""
    locked = list[int]()
    monkeypatch.setattr(CpuDevice, "lock", lambda device, memory: locked.append(memory.nbytes))
    limit = HostLimit(10**6)
    lender = HostPool("stage 1", CPU, limit, sets=3, ahead=[Slab("stage 1", 2048, CPU, limit) for _ in range(2)])
    held = [lender.lend([1024, 500]) for _ in range(3)]
    assert locked == [2048, 2048, 1024 + 512]
    assert limit.held_bytes == sum(locked)
    assert len({block.tensor.data_ptr() for blocks in held for block in blocks}) == 6
    held.clear()
    lender.lend([4096])
    assert limit.held_bytes == 3 * 4096


def test_what_was_locked_ahead_serves_one_half_after_another() -> None:
    limit = HostLimit(10**6)
    ahead = [Slab("stage 0", 4096, CPU, limit)]
    halves = [HostPool("stage 0", CPU, limit, sets=1, ahead=ahead) for _ in range(3)]
    held = [half.lend([1024]) for half in halves[:2]]
    assert limit.held_bytes == 4096
    held.append(halves[2].lend([4096]))
    assert limit.held_bytes == 2 * 4096, "there was no room left for it"
    addresses = [blocks[0].tensor.data_ptr() for blocks in held]
    assert addresses[1] - addresses[0] == 1024
