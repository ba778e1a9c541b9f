"""The table of faults does not rot: every entry applies to the source as it is, and the tests that it names are there.

Whether these find the faults takes minutes, and is what `make faults` tells.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.faults.edit import DoesNotApply, broken
from tests.faults.table import ROOT, Fault, faults
from tests.faults.verdict import Verdict, verdict_on
from tests.faults.workplace import Ended

TABLE = faults()


def test_there_are_as_many_as_there_have_to_be() -> None:
    """All are other ones; those that the suite did not see are found by now, or shown to be equivalent."""
    assert len({fault.fault for fault in TABLE}) == len(TABLE)
    assert sum(not fault.equivalent for fault in TABLE) >= 60
    assert sum(fault.unseen_before for fault in TABLE) >= 22


@pytest.mark.parametrize("fault", TABLE, ids=lambda fault: fault.fault)
def test_an_entry_applies_to_the_source(fault: Fault) -> None:
    assert fault.put_into(ROOT) != (ROOT / fault.file).read_text()


@cache
def functions_of(file: str) -> set[str]:
    return {one.name for one in ast.parse(Path(ROOT, file).read_text()).body if isinstance(one, ast.FunctionDef)}


@pytest.mark.parametrize("test", sorted({test for fault in TABLE for test in fault.found_by}))
def test_a_test_that_is_named_is_there(test: str) -> None:
    """One with parameters may name one case of them; which there are, `make faults` sees."""
    file, _, name = test.partition("::")
    assert name.partition("[")[0] in functions_of(file)


SOURCE = """
class Waits:
    def window(self):
        first()
        second()

    def other(self):
        first()
"""


def test_an_edit_is_made_in_its_function_alone() -> None:
    assert broken(SOURCE, "Waits.window", "first()\nsecond()", "second()\nfirst()") == SOURCE.replace(
        "first()\n        second()", "second()\n        first()"
    )
    assert broken(SOURCE, "Waits.other", "first", "third").endswith("third()\n")


@pytest.mark.parametrize(
    ("name", "old", "says"),
    [
        ("Waits.gone", "first()", "Waits.gone is 0 times in this file"),
        ("Waits", "first()", "`first()` is 2 times in Waits"),
        ("Waits.other", "second()", "`second()` is 0 times in Waits.other"),
    ],
)
def test_an_edit_that_does_not_apply_says_why(name: str, old: str, says: str) -> None:
    with pytest.raises(DoesNotApply) as error:
        broken(SOURCE, name, old, "")
    assert says in str(error.value)


def test_a_function_that_moved_is_told() -> None:
    """With the fault, and with where a function of that name is now."""
    fault = Fault(fault="it", place="runtime/window::_close_backward_span", old="x", new="y", why="", found_by=("a",))
    with pytest.raises(DoesNotApply, match=r"it: .*there is no megatron_lynx/runtime/window.py .*: runtime/engine\)"):
        fault.put_into(ROOT)


def ended(outcome: str, *errors: str, phase: str = "call", text: str = "") -> Ended:
    return Ended(test="tests/a.py::test[1]", phase=phase, outcome=outcome, errors=list(errors), text=text)


@pytest.mark.parametrize(
    ("seen", "found"),
    [
        ([ended("failed", "AssertionError")], True),
        ([ended("failed", "RankError", "AssertionError")], True),
        ([ended("failed", "Failed", text="DID NOT RAISE ValueError")], True),
        ([ended("passed")], False),
        ([ended("skipped", "Skipped", phase="setup")], False),
        ([ended("failed", "ImportError")], False),
        ([ended("failed", "AssertionError", phase="setup")], False),
        ([], False),
    ],
    ids=["an assertion", "on a rank", "raises", "passed", "skipped", "an import", "a fixture", "not there"],
)
def test_only_the_named_test_failing_as_it_should_counts(seen: list[Ended], found: bool) -> None:
    fault = Fault(fault="it", place="a::b", old="x", new="y", why="", found_by=("tests/a.py::test",))
    assert isinstance(verdict := verdict_on(fault, seen, "what pytest printed"), Verdict)
    assert verdict.found == found
