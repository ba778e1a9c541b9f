"""What is in the way of a file or folder that is written later: asked before anything takes long."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryFile

from megatron_lynx.errors import in_words


def against_file(file: Path) -> str | None:
    """Why the file cannot be written, in words; None where it can. Its folder is made where it is missing."""
    try:
        if file.is_dir():
            return in_words(IsADirectoryError())
        return against_folder(file.resolve().parent)
    except OSError as error:
        return in_words(error)


def against_folder(folder: Path) -> str | None:
    """Why nothing can be written into the folder. It is made where it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return in_words(error)
