"""The CPU allocator's total at any moment, without a profiler."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, final

import torch

from megatron_lynx.measure.memory import remember_blocks

_REPORTER = "_ZN3c1025profiledCPUMemoryReporterEv"
_WORDS = 24
_SIZES = (4099, 70_001)


@final
class CpuTotal:
    """The allocator's total: the word, in an object of the C10 library, that follows two test allocations exactly.

    Make it before the tensors to count.
    """

    def __init__(self) -> None:
        remember_blocks()
        reporter = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))[_REPORTER]
        reporter.restype = ctypes.c_void_p
        words = (ctypes.c_size_t * _WORDS).from_address(reporter())
        total_words = [word for word in range(_WORDS) if all(_follows(words, word, size) for size in _SIZES)]
        assert len(total_words) == 1, f"{len(total_words)} words of {_REPORTER} follow what is allocated"
        self._words, self._word = words, total_words[0]

    @property
    def bytes(self) -> int:
        return int(self._words[self._word])


def _follows(words: Any, word: int, size: int) -> bool:
    before = words[word]
    block = torch.empty(size, dtype=torch.uint8, device="cpu")
    grown = words[word] - before
    del block
    return bool(grown == size and words[word] == before)
