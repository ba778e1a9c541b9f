"""Live bytes of PyTorch's CPU allocator, asked at any moment, without a profiler.

The allocator keeps one total for all threads (`cpu_memory.remember_blocks` makes it complete) and tells it to profilers only. It
is a word of an object whose address the C10 library gives away. Which word is found by watching: the one that grows by exactly
what is allocated and shrinks by exactly what is freed, twice. Where none does, nothing is counted, and it is said.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol, final, runtime_checkable

import torch

from megatron_lynx.errors import LynxError, Problem
from megatron_lynx.measure.cpu_memory import c10_library, remember_blocks

_REPORTER = "_ZN3c1025profiledCPUMemoryReporterEv"
_WORDS = 24
"""How far to look into the object; it is a mutex, a table and the total."""
_SIZES = (4099, 70_001)
"""What is allocated to find the total: no count of anything grows by these."""


@runtime_checkable
class MemoryLimit(Protocol):
    """Who lets nobody hold more than a limit sees every operator, and knows the most that was held."""

    most_bytes: int
    """The most that was there behind an operator."""


@final
class CpuTotal:
    """The allocator's total. To be made before what is to be counted. Raises LynxError where this build of PyTorch hides it."""

    def __init__(self) -> None:
        remember_blocks()
        try:
            library = ctypes.CDLL(str(c10_library()))
            reporter: Any = library[_REPORTER]
        except (OSError, AttributeError) as error:
            raise _hidden(str(error)) from error
        reporter.restype = ctypes.c_void_p
        words = (ctypes.c_size_t * _WORDS).from_address(reporter())
        found = [word for word in range(_WORDS) if all(_follows(words, word, size) for size in _SIZES)]
        if len(found) != 1:
            raise _hidden(f"{len(found)} words that follow what is allocated")
        self._words, self._word = words, found[0]

    @property
    def bytes(self) -> int:
        """What is allocated now."""
        return int(self._words[self._word])


def _follows(words: Any, word: int, size: int) -> bool:
    before = words[word]
    block = torch.empty(size, dtype=torch.uint8, device="cpu")
    grown = words[word] - before
    del block
    return bool(grown == size and words[word] == before)


def _hidden(found: str) -> LynxError:
    needed, todo = f"a C10 library that gives away {_REPORTER}", "use a release wheel of PyTorch"
    problem = Problem(f"torch {torch.__version__}", found, needed, todo)
    return LynxError("Allocated bytes cannot be asked for on the CPU", [problem])
