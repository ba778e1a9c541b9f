"""A copy of this checkout, into whose files one fault after another is put.

What is copied is whatever the tests may read. `build` is the checkout's own: other releases of Megatron and Transformer Engine.
The copy comes first on the import path of everything that starts there, so ranks, the nursery that they are forked from and
commands in processes of their own all have the fault.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.context import ForkServerContext
from pathlib import Path

from pydantic import BaseModel

from tests.faults import session
from tests.faults.table import ROOT, Fault
from tests.faults.witness import FILE

LEFT_OUT = (".*", "build", "dist", "__pycache__", "*.egg-info", "results")


class Ended(BaseModel):
    """One phase of one test."""

    test: str
    phase: str
    outcome: str
    errors: list[str]
    text: str


class Workplace:
    """Where one test runs at a time."""

    def __init__(self, folder: Path, server: ForkServerContext) -> None:
        self.folder = folder
        self._server = server
        self._edits = 0
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*LEFT_OUT))
        (folder / "build").symlink_to(ROOT / "build")

    @contextmanager
    def with_fault(self, fault: Fault) -> Iterator[None]:
        """Inside, the copy has the fault. Raises `DoesNotApply`."""
        path = self.folder / fault.file
        source = fault.put_into(self.folder)
        before, stat = path.read_bytes(), path.stat()
        path.write_text(source)
        self._edits += 1
        later = int(stat.st_mtime) + self._edits  # compiled files are told apart by whole seconds and sizes
        os.utime(path, (later, later))
        try:
            yield
        finally:
            path.write_bytes(before)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    def run(self, tests: Sequence[str], timeout_s: float) -> tuple[list[Ended], str]:
        """Run these tests, and return how they ended, with what pytest printed. After `timeout_s` they are ended."""
        endings_file = self.folder.with_suffix(".jsonl")
        endings_file.unlink(missing_ok=True)
        log = self.folder.with_suffix(".log")
        environment = {**os.environ, "PYTHONPATH": str(self.folder), FILE: str(endings_file)}
        arguments = ["-q", "-p", "tests.faults.witness", "-p", "no:cacheprovider", *tests]
        process = self._server.Process(target=session.run, args=(arguments, str(self.folder), environment, str(log)))
        process.start()
        process.join(timeout_s)
        if process.is_alive():
            assert process.pid is not None
            with suppress(ProcessLookupError):  # before it leads a group
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
        printed = log.read_text() if log.exists() else ""
        lines = endings_file.read_text().splitlines() if endings_file.exists() else []
        return [Ended.model_validate(json.loads(line)) for line in lines], printed
