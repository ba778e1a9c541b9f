"""One session of pytest in a copy of the checkout, in a process that has torch imported: that takes longer than most tests.

    fork server (one; torch and others)  ── fork ──>  this: the copy's folder, environment and import path; then pytest

Nothing of the checkout itself may be left in the process: what the table and its reader have imported is forgotten first.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext

OF_THE_CHECKOUT = ("tests", "megatron_lynx", "scripts", "benchmarks")


def fork_server() -> ForkServerContext:
    """It imports only what no test asks to be imported in another way, under the environment of `tests/conftest.py`."""
    context = get_context("forkserver")
    os.environ |= {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    context.set_forkserver_preload(["torch", "torch._dynamo", "scipy.optimize", "pydantic", "yaml", "typer"])
    return context


def run(arguments: Sequence[str], folder: str, environment: Mapping[str, str], log: str) -> None:
    """Runs pytest, and ends with its exit status. The process leads a group of its own."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(output, number)
    sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(number, "w", closefd=False), write_through=True) for number in (1, 2))
    here = os.getcwd()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = [folder, *(entry for entry in sys.path if entry not in ("", here, folder))]
    for name in [name for name in sys.modules if name.partition(".")[0] in OF_THE_CHECKOUT]:
        del sys.modules[name]
    import pytest

    sys.argv[:] = ["pytest", *arguments]
    os._exit(int(pytest.main(list(arguments))))  # threads of a session do not hold it up
