"""Files written whole: whoever reads, at any moment, finds the old content or the new.

plan.yaml ──> .plan.yaml.<random>.tmp, beside it ──> on the disk ──> takes plan.yaml's place, with its permissions
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from megatron_lynx.errors import ConfigError, Problem, in_words


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Replace a file's content at once. Text is written as UTF-8.

    Raises `ConfigError` where the path cannot be written. Devices and pipes (`/dev/stdout`) are written through, not replaced.
    """
    written = content.encode() if isinstance(content, str) else content
    try:
        if Path(path).exists() and not Path(path).is_file() and not Path(path).is_dir():
            Path(path).write_bytes(written)
        else:
            _replace(Path(path).resolve(), written)
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
