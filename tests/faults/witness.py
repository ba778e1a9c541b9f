"""A plugin of pytest that writes down how each test ended: one line of JSON for each of its phases that is over.

It imports nothing of the package: a session decides about torch's environment before anything imports it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

FILE = "FAULTS_WITNESS"
"""The environment variable that names the file."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, pytest.TestReport, Any]:
    report = yield
    error = call.excinfo.value if call.excinfo is not None else None
    said = {
        "test": item.nodeid,
        "phase": report.when,
        "outcome": report.outcome,
        "errors": [type(one).__name__ for one in _behind(error)],
        "text": str(error)[:2000] if error is not None else "",
    }
    with Path(os.environ[FILE]).open("a") as file:
        file.write(json.dumps(said) + "\n")
    return report


def _behind(error: BaseException | None) -> Iterator[BaseException]:
    """An error, those that it holds, and what caused it: a failure on a rank is raised here with the rank's own behind it."""
    if error is not None:
        yield error
        for one in (*getattr(error, "exceptions", ()), error.__cause__):
            yield from _behind(one)
