"""A launch in a file: one word a line, as `SCRIPT --print` writes them. Words may hold blanks.

# llama3-70b: 64 x H100-80G         a comment: the line is `#`, or begins with `# `
# cluster: h100-80g                 where it is to run, unless --cluster says so
torchrun
--nproc-per-node
8
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_lynx.errors import ConfigError, Problem, in_words

OPTION = "--launch-file"
CLUSTER = re.compile(r"#\s+cluster:\s*(\S+)")
SHELL = re.compile(r"\S+\s+--\w|\\$")
"""A line of a shell's: several words of a launch in it, or one that goes on in the next."""


@dataclass(frozen=True)
class LaunchFile:
    """What a file says."""

    words: tuple[str, ...]
    cluster: str | None = None
    """The one of its comments that names a cluster; the last one counts."""


def read_launch_file(path: Path) -> LaunchFile:
    """Raises `ConfigError` for a file that cannot be read, or that holds no words one a line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise _refused(path, "no text in UTF-8") from None
    except OSError as error:
        raise _refused(path, in_words(error)) from None
    comments = [line for line in lines if line == "#" or line.startswith("# ")]
    words = tuple(line for line in lines if line.strip() and line not in comments)
    if not words:
        raise _refused(path, "no words" if lines else "an empty file")
    if (strange := _of_a_shell(words)) is not None:
        raise _refused(path, f"a line of several words, {strange!r}")
    named = [found[1] for line in comments if (found := CLUSTER.match(line))]
    return LaunchFile(words, named[-1] if named else None)


def _of_a_shell(words: Sequence[str]) -> str | None:
    return next((word if len(word) < 40 else f"{word[:37]}..." for word in words if SHELL.search(word)), None)


def _refused(path: Path, found: str) -> ConfigError:
    todo = "a shell writes one so: printf '%s\\n' torchrun ... > FILE"
    problem = Problem(f"{OPTION} {path}", found, "a launch, one word a line; comments begin with '# '", todo)
    return ConfigError("the launch cannot be read", [problem])
