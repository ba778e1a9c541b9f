"""Whether a file that is written later can be written: asked before training, not after."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_lynx.errors import Problem
from megatron_lynx.writable import against_file


def unwritable(flag: str, path: Path) -> Iterator[Problem]:
    """What is wrong with the path that a flag names. Its folder is made, where it is not there."""
    if (found := against_file(path)) is not None:
        yield Problem(flag, f"{path} ({found})", "a file that can be written")
