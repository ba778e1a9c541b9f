"""What came of a fault: the tests that were to see it failed as the table says, or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.faults.table import Fault
from tests.faults.workplace import Ended


@dataclass(frozen=True)
class Verdict:
    """`found`, and if not what happened instead."""

    found: bool
    said: str


def verdict_on(fault: Fault, ended: Sequence[Ended], printed: str) -> Verdict:
    """Every test that the entry names has to fail, in the test itself, with the entry's error; of its cases at least one."""
    for test in fault.found_by:
        of_test = _of(test, ended)
        failed = [one for one in of_test if one.outcome == "failed"]
        if not of_test:
            return Verdict(False, f"{test} did not run:\n{_last_lines(printed)}")
        if not failed:
            return Verdict(False, f"{test} {'was skipped' if _skipped(of_test) else 'PASSED'}")
        if not any(one.phase == "call" and _is(fault.fails_with, one) for one in failed):
            first = failed[0]
            return Verdict(False, f"{test} failed with {first.errors} in its {first.phase}, not {fault.fails_with}: {first.text}")
    return Verdict(True, "found")


def unfit(tests: Sequence[str], ended: Sequence[Ended]) -> dict[str, str]:
    """Tests that do not pass without any fault, and how they end."""
    found = {}
    for test in tests:
        of_test = _of(test, ended)
        failed = [one for one in of_test if one.outcome == "failed"]
        if not of_test:
            found[test] = "is not there"
        elif failed:
            found[test] = f"fails without a fault: {failed[0].text[:300]}"
        elif _skipped(of_test):
            found[test] = f"is skipped: {next(one.text for one in of_test if one.outcome == 'skipped')}"
    return found


def _of(test: str, ended: Sequence[Ended]) -> list[Ended]:
    """Those of a test, of all its cases if none is named."""
    return [one for one in ended if one.test == test or one.test.startswith(f"{test}[")]


def _is(error: str, one: Ended) -> bool:
    """Whether a test failed with this error. `pytest.raises` asserts, too, and fails otherwise."""
    return error in one.errors or (error == "AssertionError" and one.text.startswith("DID NOT RAISE"))


def _skipped(ended: Sequence[Ended]) -> bool:
    return any(one.outcome == "skipped" for one in ended)


def _last_lines(printed: str) -> str:
    return "\n".join(printed.splitlines()[-8:])
