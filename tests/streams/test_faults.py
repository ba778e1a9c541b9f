"""Each instrument finds each fault that it is there for, by name; the same run without the fault is clean.

account     from the waits that were asked for, whether or not this run shows anything       `happens_before`
streams     late copies, and memory that is NaN once let go: bits differ, or a copy says so  `asynchronous`
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.tiny_jobs import tiny_job
from tests.transparency.trials import Trial

from . import faults, on_ranks
from .test_layouts import NO_SYNC, PP2, PP4, SP, TP2, assert_clean, half_by_half, leaving, recomputing

pytestmark = pytest.mark.streams

OFFLOADED, TENSOR, GATHERED = (PP2, leaving), (TP2, recomputing), (SP, recomputing)
WITHIN = ({"microbatches": 2}, half_by_half)
"""Half by half, of one stage."""
PLACE = r"asked for at \S*megatron_lynx/runtime/(?:device|offload/\w+)\.py:.*"
OUT, BACK = rf"copy \d+ of offload, {PLACE}", rf"copy \d+ of reload, {PLACE}"
READS_OUT, WRITES_OUT = rf"{OUT} \(reads, on offload\)", rf"{OUT} \(writes, on offload\)"
READS_BACK, WRITES_BACK = rf"{BACK} \(reads, on reload\)", rf"{BACK} \(writes, on reload\)"
READ, WRITTEN = r"\w+ \(reads, on compute\)", r"\w+ \(writes, on compute\)"
LET_GO = r"letting go of that memory, which \w+ can get,"
GATHER = r"\w*all_?gather\w* of ranks \[0, 1\] \(float32 .*\), asked for at \S*tests/streams/faults\.py.*"
REDUCE = r"allreduce of ranks \[0, 1\] \(float32 .*\), asked for at \S*apply/hooks/collectives\.py.*"
RACES: dict[Any, tuple[tuple[Any, Any], str, str]] = {
    faults.a_copy_out_that_does_not_wait: (OFFLOADED, READS_OUT, WRITTEN),
    faults.a_reload_that_does_not_wait: (OFFLOADED, READS_BACK, WRITES_OUT),
    faults.a_backward_that_does_not_wait: (OFFLOADED, READ, WRITES_BACK),
    faults.an_original_released_early: (OFFLOADED, LET_GO, READS_OUT),
    faults.a_copy_back_into_memory_let_go: (OFFLOADED, LET_GO, WRITES_BACK),
    faults.host_memory_lent_too_early: ((PP4, leaving), WRITES_OUT, READS_BACK),
    faults.a_gather_buffer_reused: (GATHERED, READ, GATHER),
    faults.a_collective_that_is_not_waited_for: (TENSOR, READ, REDUCE),
}
"""What the account says of each fault: who does not wait, and for whom."""
RACES_WITHIN: dict[Any, tuple[str, str]] = {
    fault: RACES[fault][1:]
    for fault in (
        faults.a_copy_out_that_does_not_wait,
        faults.a_reload_that_does_not_wait,
        faults.a_backward_that_does_not_wait,
        faults.an_original_released_early,
        faults.a_copy_back_into_memory_let_go,
    )
}
"""The same of a micro-batch whose own backward follows at once."""
SHOWN = {
    faults.a_reload_that_does_not_wait: None,
    faults.a_backward_that_does_not_wait: None,
    faults.an_original_released_early: rf"{OUT} reads memory that was let go before the copy was over",
    faults.a_copy_back_into_memory_let_go: rf"{BACK} writes memory that was let go before the copy was over",
}
"""What late copies show of a fault on the same device; None: other bits."""


def run(pool_of: Any, case: tuple[Any, Any], fault: Any = None) -> list[on_ranks.Under]:
    layout, plan = case
    job = tiny_job("gpt", **layout)
    more = {} if fault is None else {"fault": fault}
    return [under for [under] in pool_of(job.gpus).run(watch_with, job, [plan(job)], more)]


def watch_with(rank: int, job: Any, plans: Any, more: dict[str, Any]) -> list[on_ranks.Under]:
    return on_ranks.watched(rank, job, plans, Trial(steps=2, model=NO_SYNC), **more)


@pytest.mark.parametrize("case", [OFFLOADED, WITHIN, TENSOR, GATHERED], ids=["offloaded", "within", "tensor", "gathered"])
def test_without_a_fault(pool_of: Any, case: Any) -> None:
    for rank, under in enumerate(run(pool_of, case)):
        assert_clean(under, f"rank {rank}")


@pytest.mark.parametrize("fault", RACES, ids=lambda fault: fault.__name__)
def test_the_account_names_the_fault(pool_of: Any, fault: Any) -> None:
    case, then, first = RACES[fault]
    races = run(pool_of, case, fault)[0].races
    assert any(re.fullmatch(f"{then} does not wait for {first}.*", race) for race in races), races[:5]


@pytest.mark.parametrize("fault", RACES_WITHIN, ids=lambda fault: fault.__name__)
def test_the_account_names_the_fault_within_a_micro_batch(pool_of: Any, fault: Any) -> None:
    then, first = RACES_WITHIN[fault]
    races = run(pool_of, WITHIN, fault)[0].races
    assert any(re.fullmatch(f"{then} does not wait for {first}.*", race) for race in races), races[:5]


def test_memory_that_another_tensor_has_by_now(pool_of: Any) -> None:
    """What was let go while its forward goes on leaves its address to others, of which it must not be taken for one."""
    assert run(pool_of, WITHIN, faults.an_address_taken_for_its_tensor)[0].differing


@pytest.mark.parametrize("fault", SHOWN, ids=lambda fault: fault.__name__)
def test_late_copies_show_the_fault(pool_of: Any, fault: Any) -> None:
    under = run(pool_of, OFFLOADED, fault)[0]
    said = SHOWN[fault]
    if said is None:
        assert under.differing
    else:
        assert any(re.search(said, found) for found in under.found), under.found[:5]
