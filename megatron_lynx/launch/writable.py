"""Whether a file that is written later can be written: asked before training, not after."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron_lynx.errors import Problem


def unwritable(flag: str, path: Path) -> Iterator[Problem]:
    """What is wrong with the path that a flag names. Its folder is made, where it is not there."""
    if path.is_dir():
        yield Problem(flag, f"{path}, a folder", "a file that can be written")
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        yield Problem(flag, f"{path} ({error.strerror})", "a file that can be written")
