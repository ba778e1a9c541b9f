"""Reads and writes the files that users name."""

from __future__ import annotations

import json
import os
import sys
import uuid
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from megatron_lynx.errors import ConfigError, Problem, in_words
from megatron_lynx.units import MIB, format_bytes

MOST_BYTES = 16 * MIB
"""Largest file that is read. A plan of the largest models is smaller than 1 MiB."""

STANDARD_INPUT = "-"


def text_in(
    path: str | os.PathLike[str],
    needed: str,
    *,
    where: str = "",
    headline: str = "",
    todo: str = "",
    most_bytes: int = MOST_BYTES,
) -> str:
    """The text of a file, or of standard input for `-`, without a byte order mark.

    Raises `ConfigError` for a file that cannot be read, has more than `most_bytes`, or is no UTF-8. `needed`, `todo`: of its
    problem; `where`, `headline`: in place of the file's name.
    """
    name = os.fspath(path)
    where, headline = where or name, headline or f"{name} cannot be read"
    try:
        with nullcontext(sys.stdin.buffer) if name == STANDARD_INPUT else open(name, "rb") as file:
            content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise ConfigError(headline, [Problem(where, f"more than {format_bytes(most_bytes)}", needed, todo)])
        return content.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(headline, [Problem(where, in_words(error), needed, todo)]) from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        byte_in_words = f"a byte that is no text (0x{error.object[error.start]:02x})"
        raise ConfigError(headline, [Problem(f"{where}:{line}", byte_in_words, "UTF-8", todo)]) from None


def json_in(path: str | os.PathLike[str], needed: str, *, todo: str = "", most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """The mapping in a JSON file. Raises `ConfigError` as `text_in` does, and for anything but one mapping."""
    text, where = text_in(path, needed, todo=todo, most_bytes=most_bytes), os.fspath(path)
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        content, needed = f"JSON that breaks off or is damaged at character {error.pos} of {len(text)}", "whole JSON"
    except ValueError as error:  # a number with too many digits
        content = f"no JSON ({error})"
    except RecursionError:
        content = "brackets nested too deeply"
    else:
        if isinstance(data, dict):
            return data
        content = f"JSON with a {type(data).__name__} at the top"
    raise ConfigError(f"{where} cannot be read", [Problem(where, content, needed, todo)])


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Replace a file's content at once, by renaming a temporary file in its folder. Text is written as UTF-8.

    Raises `ConfigError` if the path cannot be written. Devices and pipes (`/dev/stdout`) are written through, not replaced.
    """
    written = content.encode() if isinstance(content, str) else content
    try:
        if Path(path).exists() and not Path(path).is_file() and not Path(path).is_dir():
            Path(path).write_bytes(written)
        else:
            _replace(Path(os.path.realpath(path)), written)
    except OSError as error:
        problem = Problem(os.fspath(path), in_words(error), "a file that can be written")
        raise ConfigError(f"{os.fspath(path)} cannot be written", [problem]) from error


def _replace(target: Path, content: bytes) -> None:
    fresh = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        with fresh.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            fresh.chmod(target.stat().st_mode)
        os.replace(fresh, target)
    finally:
        fresh.unlink(missing_ok=True)


def against_file(file: Path) -> str | None:
    """Why the file cannot be written, in words, or None. Creates its folder."""
    try:
        if file.is_dir():
            return in_words(IsADirectoryError())
        return against_folder(Path(os.path.realpath(file)).parent)
    except OSError as error:
        return in_words(error)


def against_folder(folder: Path) -> str | None:
    """Why the folder cannot be written to, or None. Creates it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return in_words(error)
