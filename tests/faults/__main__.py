"""`python -m tests.faults [WORDS]`: put in all faults, or those whose name or place has one of the words; say what is missed."""

from __future__ import annotations

import queue
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.faults.edit import DoesNotApply
from tests.faults.session import fork_server
from tests.faults.table import Fault, faults
from tests.faults.verdict import Verdict, unfit, verdict_on
from tests.faults.workplace import Workplace

SIDE_BY_SIDE = 2
LONGEST_S = 240.0
"""Of the tests of one fault."""
LONGEST_WITHOUT_S = 1200.0
"""Of all tests without a fault."""


def main(words: Sequence[str]) -> int:
    """0 if all were found."""
    begin = time.monotonic()
    chosen = [fault for fault in faults() if not words or any(word in f"{fault.fault} {fault.place}" for word in words)]
    tried = [fault for fault in chosen if not fault.equivalent]
    server = fork_server()
    with tempfile.TemporaryDirectory() as folder:
        places = queue.Queue[Workplace]()
        for number in range(SIDE_BY_SIDE):
            places.put(Workplace(Path(folder, f"copy{number}"), server))
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            wrong = _without_faults(tried, places, pool)
            verdicts = list(pool.map(lambda fault: _try(fault, places, wrong), tried))
    missed = [fault for fault, verdict in zip(tried, verdicts, strict=True) if not verdict.found]
    minutes = (time.monotonic() - begin) / 60
    print(f"{len(tried) - len(missed)} of {len(tried)} faults found, {len(chosen) - len(tried)} equivalent; {minutes:.1f} min")
    for fault in missed:
        print(f"  NOT FOUND: {fault.fault} ({fault.place})")
    return 1 if missed else 0


def _without_faults(tried: Sequence[Fault], places: queue.Queue[Workplace], pool: ThreadPoolExecutor) -> dict[str, str]:
    """Tests that are of no use, because they do not pass where nothing is broken. Those of one file stay together."""
    tests = sorted({test for fault in tried for test in fault.found_by})
    files = sorted({test.partition("::")[0] for test in tests})
    shares = [[test for test in tests if test.partition("::")[0] in files[turn::SIDE_BY_SIDE]] for turn in range(SIDE_BY_SIDE)]

    def run(share: Sequence[str]) -> dict[str, str]:
        place = places.get()
        try:
            return unfit(share, place.run(share, LONGEST_WITHOUT_S)[0]) if share else {}
        finally:
            places.put(place)

    wrong = {test: how for found in pool.map(run, shares) for test, how in found.items()}
    print(f"{len(tests)} tests without a fault: {len(tests) - len(wrong)} pass", flush=True)
    return wrong


def _try(fault: Fault, places: queue.Queue[Workplace], wrong: dict[str, str]) -> Verdict:
    place = places.get()
    begin = time.monotonic()
    try:
        verdict = _verdict(fault, place, wrong)
    finally:
        places.put(place)
    said = "found" if verdict.found else f"NOT FOUND: {verdict.said}"
    print(f"{time.monotonic() - begin:5.0f} s  {fault.fault}: {said}", flush=True)
    return verdict


def _verdict(fault: Fault, place: Workplace, wrong: dict[str, str]) -> Verdict:
    if of_no_use := [f"{test} {wrong[test]}" for test in fault.found_by if test in wrong]:
        return Verdict(False, "; ".join(of_no_use))
    try:
        with place.with_fault(fault):
            return verdict_on(fault, *place.run(fault.found_by, LONGEST_S))
    except DoesNotApply as error:
        return Verdict(False, f"the entry does not apply: {error}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
