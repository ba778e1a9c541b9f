"""How a run ended: whether as it should have, and where it ended badly which rank, how far it was, and why, in one line.

    the training loop returns    it ended as it should have: what is told at the end is told
      or exits by 0              likewise: Megatron's does, between steps, when its time is over or a signal came
    the script raises            its line, then Python's own traceback; exit status 1
    the script exits, not by 0   its line: `sys.exit` says nothing
    all ranks end together       nothing: why was said already (`agreement`)
    a signal, an abort           Python's stacks of all threads, also while the interpreter shuts down

torchrun ends with status 1 whatever became of a rank, and prints its report behind all that ranks have printed. When the script
has returned nothing of this package runs any more: plans are removed, and our groups and threads ended, when the training loop
ends.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_lynx.errors import LynxError
from megatron_lynx.launch.agreement import Ended
from megatron_lynx.launch.message import say


@contextmanager
def named_ending(how_far: Callable[[], str]) -> Iterator[None]:
    """Says how what runs inside ended, and lets it end so. `how_far`: where a run was, in words (`in step 3`)."""
    if not faulthandler.is_enabled() and _can_write(sys.stderr):
        faulthandler.enable()  # until the process ends: what aborts it may come when nothing of Python's runs any more
    try:
        yield
    except (Ended, LynxError):
        raise
    except SystemExit as end:
        if end.code not in (None, 0):
            _say(how_far, f"sys.exit({end.code!r})")
        raise
    except BaseException as error:
        first = str(error).partition("\n")[0]
        _say(how_far, f"{type(error).__name__}: {first}" if first else type(error).__name__)
        raise


@contextmanager
def concluded(conclude: Callable[[], None], between_steps: Callable[[], bool]) -> Iterator[None]:
    """Runs `conclude` where the training loop inside ended as it should have, on all ranks alike."""
    try:
        yield
    except SystemExit as end:
        if end.code in (None, 0) and between_steps():
            conclude()
        raise
    conclude()


def _say(how_far: Callable[[], str], cause: str) -> None:
    say(f"megatron-lynx: rank {os.environ.get('RANK', '0')} ended {how_far()}: {cause}")


def _can_write(stream: object) -> bool:
    """Whether it is a file of the system's, as the handler needs."""
    try:
        stream.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return False
    return True
