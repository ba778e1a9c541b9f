"""How much of its host one rank may hold, by what all ranks say of theirs; rooms of exact sizes, lent again and again."""

from __future__ import annotations

import pytest
import torch

from megatron_lynx.errors import OffloadError
from megatron_lynx.free_memory import FreeMemory, Pot
from megatron_lynx.runtime.device import Copier, Device, Trace
from megatron_lynx.runtime.host_memory import ALIGNMENT, HostFacts, HostLimit, HostMemory, Lease, limit_of, too_little
from megatron_lynx.runtime.offload import Offloader, OffloadPolicy
from tests.runtime.devices import CPU


def rank(*pots: tuple[str, int], state_bytes: int = 0) -> HostFacts:
    return HostFacts(FreeMemory(tuple(Pot(f"pot {name}", name, free) for name, free in pots)), state_bytes)


def most(ranks: list[HostFacts]) -> list[int]:
    return [limit_of(mine, ranks).most_bytes for mine in ranks]


def test_ranks_of_one_machine_share_it_whoever_started_them() -> None:
    """`LOCAL_WORLD_SIZE` said how many there were, and srun does not set it: each of eight ranks took all of the host."""
    assert most([rank(("a", 8000)), rank(("a", 8000)), rank(("b", 8000))]) == [3600, 3600, 7200]
    assert most([rank(("a", 8000))]) == [7200]


def test_each_of_two_containers_of_one_machine_has_its_own_limit_and_both_have_the_machines() -> None:
    ranks = [rank(("machine", 8000), ("first", 1000)), *[rank(("machine", 8000), ("second", 9000))] * 3]
    assert most(ranks) == [900, 1800, 1800, 1800]


def test_what_ranks_saw_at_different_moments_counts_as_its_least() -> None:
    assert most([rank(("a", 8000)), rank(("a", 6000))]) == [2700, 2700]


def test_the_states_of_all_ranks_are_left_room_for() -> None:
    """An asynchronous checkpoint copies them to the host, where an optimizer on the CPU has them anyway."""
    assert most([rank(("a", 8000), state_bytes=1000), rank(("a", 8000), state_bytes=3000)]) == [2000, 2000]
    assert most([rank(("a", 8000), state_bytes=9000)]) == [0]


def test_the_reserve_is_seen_where_it_is_too_much() -> None:
    limit = limit_of(rank(("a", 8192)), [rank(("a", 8192))] * 2)
    (problem,) = too_little("stage 0", 5000, limit).problems
    assert problem.finding == (
        "3686 bytes (3.60 KiB) available to this rank (8.00 KiB free of pot a, 819 B of it in reserve, for 2 ranks)"
    )


def test_a_host_without_memory_is_one_message() -> None:
    with pytest.raises(OffloadError) as refused:
        Offloader({0: OffloadPolicy(600, 1, 2)}, device=CPU, limit=limit_of(rank(("a", 0)), [rank(("a", 0))]))
    (problem,) = refused.value.problems
    assert problem.finding.startswith(
        "0 bytes (0 B) available to this rank (0 B free of pot a, 0 B of it in reserve, for 1 rank)"
    )
    assert problem.needed == "1200 bytes (1.17 KiB)"


def test_what_a_plan_needs_is_locked_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first forwards locked it, on all ranks of a host at once: seconds of each of the first steps."""
    locked = list[int]()
    monkeypatch.setattr(Device, "lock", lambda device, memory: locked.append(memory.nbytes))
    limit = HostLimit(10**6)
    made = Offloader({0: OffloadPolicy(6000, 1, 2), 1: OffloadPolicy(900, 1, 1, ragged=True)}, device=CPU, limit=limit)
    made.lock_ahead()
    assert locked == [2 * (6144 + 512)], "of experts it is not known before how much"
    assert made.locked[0] == limit.held_bytes == sum(locked)
    lent = [made.memory.lend(0, [4000, 2000]) for _ in range(2)]
    assert len(locked) == 1
    lent.clear()
    made.close()
    assert limit.held_bytes == 0


def test_nothing_is_locked_ahead_where_only_just_enough_is_free() -> None:
    limit = HostLimit(6000)
    made = Offloader({0: OffloadPolicy(6000, 1, 1)}, device=CPU, limit=limit)
    made.lock_ahead()
    assert (made.locked[0], limit.held_bytes) == (0, 0)
    made.close()


def test_a_host_that_does_not_give_what_it_promised_leaves_nothing_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    def lock(device: object, memory: object) -> None:
        raise RuntimeError("cudaHostRegister returned 2")

    monkeypatch.setattr(Device, "lock", lock)
    limit = HostLimit(10**6)
    made = Offloader({0: OffloadPolicy(6000, 1, 1), 1: OffloadPolicy(6000, 1, 1)}, device=CPU, limit=limit)
    with pytest.raises(OffloadError, match="the host has too little memory"):
        made.lock_ahead()
    assert limit.held_bytes == 0
    made.close()


def memory(*, limit_bytes: int = 10**6) -> HostMemory:
    return HostMemory("stage 1", CPU, HostLimit(limit_bytes))


def parts(lease: Lease) -> list[torch.Tensor]:
    return list(lease.room._parts)


def sizes_of(lease: Lease) -> list[int]:
    return [part.nbytes for part in parts(lease)]


def room_bytes(lease: Lease) -> int:
    return lease.room.memory.nbytes


def test_parts_have_the_sizes_asked_for_and_do_not_overlap() -> None:
    """Nothing is rounded up to powers of two, as PyTorch's own page-locked allocator does; parts begin at multiples of 256."""
    lender, sizes = memory(), [3000, 100, 5000]
    lease = lender.lend(0, sizes)
    for number, part in enumerate(parts(lease)):
        part.fill_(number)
    assert sizes_of(lease) == sizes
    assert [set(part.tolist()) for part in parts(lease)] == [{0}, {1}, {2}]
    assert lender.bytes == room_bytes(lease) == sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
    assert {part.data_ptr() % ALIGNMENT for part in parts(lease)} == {parts(lease)[0].data_ptr() % ALIGNMENT}


def test_a_room_serves_whatever_has_no_more_bytes() -> None:
    """In whatever sizes: one half's storages are copied together."""
    lender = memory()
    lender.lend(0, [4096, 1024, 2048])
    for sizes in ([2000, 900], [1024] * 7, [7168]):
        lease = lender.lend(0, sizes)
        assert (sizes_of(lease), room_bytes(lease)) == (sizes, 7168)
        for number, part in enumerate(parts(lease)):
            part.fill_(number)
        assert [set(part.tolist()) for part in parts(lease)] == [{number} for number in range(len(sizes))]
        del lease
    assert lender.bytes == 7168, "one room, as each came back before the next was lent"


def test_a_part_keeps_the_shape_in_which_it_was_used() -> None:
    lender, like = memory(), torch.randn(4, 8)
    lease = lender.lend(0, [128])
    address = parts(lease)[0].data_ptr()
    shaped = lease.room.part(0, like)
    assert (shaped.dtype, shaped.shape, shaped.data_ptr()) == (like.dtype, like.shape, address)
    del lease
    again = lender.lend(0, [128])
    assert again.room.part(0, like) is shaped
    other = again.room.part(0, torch.arange(16))
    assert (other.dtype, other.shape, other.data_ptr()) == (torch.int64, (16,), address)


def test_what_is_given_back_is_lent_again() -> None:
    lender = memory()
    addresses = set()
    for _ in range(50):
        leases = [lender.lend(0, [512, 1024]), lender.lend(0, [512, 1024])]
        addresses |= {part.data_ptr() for lease in leases for part in parts(lease)}
        leases.clear()
    assert lender.bytes == 2 * (512 + 1024)
    assert len(addresses) == 4


def test_a_room_comes_with_the_copy_that_may_still_read_it() -> None:
    lender, copier = memory(), Copier("reload", CPU, Trace(CPU))
    lease = lender.lend(0, [64])
    copy = lease.room.last = copier.start([(torch.empty(64, dtype=torch.uint8), parts(lease)[0])], 0)
    del lease
    assert lender.lend(0, [64]).room.last is copy
    copier.close()


def test_more_bytes_make_other_rooms() -> None:
    lender = memory()
    old = [lender.lend(0, [1024, 512]), lender.lend(0, [512, 256])]
    old.clear()
    assert room_bytes(lender.lend(0, [700, 600])) == 1536, "a larger room serves, if it is free"
    old = [lender.lend(0, [1024, 512])]
    larger = lender.lend(0, [2048, 512])
    assert room_bytes(larger) == 3072, "an eighth more, and up to a multiple of 256"
    assert lender.bytes == 3072
    parts(old[0])[0].fill_(1)  # lent, so still there
    old.clear()
    del larger
    assert room_bytes(lender.lend(0, [1024, 512])) == 3072, "old rooms are not lent again"


def test_sizes_that_differ_each_time_are_soon_served_without_more_memory() -> None:
    """As experts' are. The most bytes that were asked for count."""
    lender = memory()
    for sizes in ([4000, 1000], [3000, 1100], [4400, 1200], [100, 1200, 4450]):
        lender.lend(0, sizes)
        held_bytes = lender.bytes
    for sizes in ([4400, 1200], [1237, 4500, 112], [900]):
        lender.lend(0, sizes)
    assert lender.bytes == held_bytes


def test_rooms_as_large_as_asked_where_an_eighth_more_is_too_much() -> None:
    lender = memory(limit_bytes=4096)
    lender.lend(0, [1024])
    assert room_bytes(lender.lend(0, [4000])) == 4096


def test_memory_is_locked_for_one_micro_batch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it was page-locked at the end of the first forward: seconds, for tens of GB, in which the device idled."""
    locked = list[int]()
    monkeypatch.setattr(Device, "lock", lambda device, memory: locked.append(memory.nbytes))
    lender, held = memory(), []
    for number in range(1, 4):
        held.append(lender.lend(0, [1024, 512]))
        assert locked == [1024 + 512] * number
    held.pop(0)
    lender.lend(0, [1024, 512])
    assert len(locked) == 3, "what came back is lent again"


def test_more_micro_batches_than_planned_make_room() -> None:
    lender = memory()
    lender.lock(1024)
    lent = [lender.lend(0, [1024]) for _ in range(3)]
    assert lender.bytes == 1024 * len(lent)


def test_too_little_memory_is_refused_with_both_numbers() -> None:
    lender = memory(limit_bytes=5000)
    lent = [lender.lend(0, [1024, 2048])]
    with pytest.raises(OffloadError) as refused:
        lender.lend(0, [1024, 2048])
    (problem,) = refused.value.problems
    assert problem.where == "stage 1: host memory for offloaded activations"
    assert "5000 bytes" in problem.finding
    assert "6144 bytes" in problem.needed
    assert lender.bytes == 3072
    lent.clear()
    lender.lend(0, [1024, 2048])


def test_stages_of_one_rank_share_what_it_may_hold() -> None:
    """Each within the limit, all of them were not: host memory ran out in the middle of training."""
    limit = HostLimit(5000)
    first, second = (HostMemory(f"stage {stage}", CPU, limit) for stage in range(2))
    first.lend(0, [3072])
    with pytest.raises(OffloadError, match=r"5000 bytes .* available to this rank, needed 6144 bytes"):
        second.lend(0, [3072])
    first.lend(0, [4096])
    assert limit.held_bytes == first.bytes == 4608, "what was replaced is not counted twice"
    first.clear()
    assert limit.held_bytes == 0
    second.lend(0, [3072])


def test_what_lent_rooms_keep_pinned_was_forgotten() -> None:
    """Rooms that were replaced by larger ones, and were still lent, counted as given back: the host ran out of memory."""
    limit = HostLimit(10_000)
    lender = HostMemory("stage 1", CPU, limit)
    old = [lender.lend(0, [4096])]
    new = [lender.lend(0, [5120])]
    assert (limit.held_bytes, lender.bytes) == (4096 + 5888, 5888)
    with pytest.raises(OffloadError, match="needed 14080 bytes"):
        lender.lend(1, [4096])
    old.clear()
    assert limit.held_bytes == 5888
    new.clear()
    lender.clear()
    assert limit.held_bytes == 0


def test_what_was_locked_ahead_is_cut_into_rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    """One slab serves one micro-batch, one half and one chunk after another; rooms for which it has no space are locked later."""
    locked = list[int]()
    monkeypatch.setattr(Device, "lock", lambda device, memory: locked.append(memory.nbytes))
    limit = HostLimit(10**6)
    lender = HostMemory("stage 1", CPU, limit)
    lender.lock(2 * (1024 + 512))
    held = [lender.lend(key, [1024, 500]) for key in (0, 1, 1)]
    assert locked == [3072, 1536]
    assert limit.held_bytes == sum(locked)
    assert len({part.data_ptr() for lease in held for part in parts(lease)}) == 6
    held.clear()
    lender.lend(0, [4096])
    assert limit.held_bytes == 3072 + 1536 + 4608
    lender.lend(1, [4096])
    assert limit.held_bytes == 2 * 4608, "the slab went with the last of its rooms"
