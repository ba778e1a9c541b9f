"""How much of its host one rank may hold, by what all ranks say of theirs."""

from __future__ import annotations

import pytest

from megatron_lynx.errors import OffloadError
from megatron_lynx.free_memory import FreeMemory, Pot
from megatron_lynx.runtime.device import CpuDevice
from megatron_lynx.runtime.offload import HostFacts, HostLimit, Offloader, OffloadPolicy, limit_of
from megatron_lynx.runtime.offload.host_memory import too_little
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
    assert problem.found == (
        "3686 bytes (3.60 KiB) available to this rank (8.00 KiB free of pot a, 819 B of it in reserve, for 2 ranks)"
    )


def test_a_host_without_memory_is_one_message() -> None:
    with pytest.raises(OffloadError) as refused:
        Offloader({0: OffloadPolicy(600, 1, 1, 2)}, device=CPU, limit=limit_of(rank(("a", 0)), [rank(("a", 0))]))
    (problem,) = refused.value.problems
    assert problem.found.startswith("0 bytes (0 B) available to this rank (0 B free of pot a, 0 B of it in reserve, for 1 rank)")
    assert problem.needed == "1200 bytes (1.17 KiB)"


def test_what_a_plan_needs_is_locked_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first forwards locked it, on all ranks of a host at once: seconds of each of the first steps."""
    locked = list[int]()
    monkeypatch.setattr(CpuDevice, "lock", lambda device, memory: locked.append(memory.nbytes))
    limit = HostLimit(10**6)
    made = Offloader({0: OffloadPolicy(6000, 1, 1, 2), 1: OffloadPolicy(900, 1, 1, 1, ragged=True)}, device=CPU, limit=limit)
    made.lock_ahead()
    assert locked == [6144 + 512] * 2, "of experts it is not known before how much"
    assert made.locked.bytes == limit.held_bytes == sum(locked)
    made._pool(0).lend([4000, 2000])
    assert len(locked) == 2
    made.close()
    assert limit.held_bytes == 0


def test_nothing_is_locked_ahead_where_only_just_enough_is_free() -> None:
    limit = HostLimit(6000)
    made = Offloader({0: OffloadPolicy(6000, 1, 1, 1)}, device=CPU, limit=limit)
    made.lock_ahead()
    assert (made.locked.bytes, limit.held_bytes) == (0, 0)
    made.close()


def test_a_host_that_does_not_give_what_it_promised_leaves_nothing_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    locked = list[int]()

    def lock(device: object, memory: object) -> None:
        if locked:
            raise RuntimeError("cudaHostRegister returned 2")
        locked.append(1)

    monkeypatch.setattr(CpuDevice, "lock", lock)
    limit = HostLimit(10**6)
    made = Offloader({0: OffloadPolicy(6000, 1, 1, 1), 1: OffloadPolicy(6000, 1, 1, 1)}, device=CPU, limit=limit)
    with pytest.raises(OffloadError, match="the host has too little memory"):
        made.lock_ahead()
    assert limit.held_bytes == 0
    made.close()
