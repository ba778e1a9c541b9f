"""Notes on a CPU rank what its host would give to a GPU, and where it would wait: the `Log` of real megatron-core.

    noted                                           as
    any operation that computes or copies           a kernel of the compute stream, named after the part that runs
    reading a number of a tensor                    the host waits for compute: on a GPU it would
    collectives and messages of any group           `communication`
    copies of activations to the host and back      `seam`
    torch.cuda.synchronize                          the host waits for everything; here it goes on, and the replay decides

A tensor that would be the host's own on a GPU cannot be told apart here, so reading it counts as waiting, too; but for bytes,
which are states of random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.instruments.queues.communication import note_communication
from tests.instruments.queues.log import Log
from tests.instruments.queues.seam import note_copies
from tests.instruments.replacing import replace

READS = ("_local_scalar_dense", "equal", "nonzero", "masked_select")
"""Operations whose result the host needs."""

ALLOCATES = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")
"""Operations that give memory and, as those that make a view, give the device nothing to do."""


class Recorder:
    """Notes what happens inside its `with` block, on the thread that entered it."""

    def __init__(self, rank: int) -> None:
        self.log = Log(rank)
        self.running = "kernels"
        """The part that runs, as `part` names it."""
        self._undo = ExitStack()

    def __enter__(self) -> Recorder:
        note_communication(self._undo, self.log)
        note_copies(self._undo, self.log)
        replace(self._undo, torch.cuda, "synchronize", lambda device=None: self.log.synchronize())
        self._undo.enter_context(_Operations(self))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._undo.close()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Name the kernels inside, and say so where the host waits."""
        before, self.running = self.running, name
        self.log.mark(name)
        yield
        self.running = before
        self.log.mark(before)


class _Operations(TorchDispatchMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        log, name = self._recorder.log, func._schema.name.removeprefix("aten::")
        if name in READS and args[0].dtype != torch.uint8:
            log.synchronize(f"{name} of a tensor", [log.event()])
        elif not (name.startswith("c10d::") or func.is_view or name in ALLOCATES):
            log.kernel(self._recorder.running)
        return func(*args, **(kwargs or {}))
