"""Checks that files and folders for answers can be written, before anything takes long."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.writable import against_file, against_folder


def check_writable(*files: Path | None, read: Iterable[Path | None] = ()) -> None:
    """Whether the answers can be written, each to a place of its own, and none over what is `read`. All problems at once."""
    problems: list[Problem] = []
    taken = {_place(file): "a file that is read" for file in read if file is not None}
    for file in files:
        if file is None or _is_device(file):
            continue
        if (place := _place(file)) in taken:
            problems.append(Problem(os.fspath(file), taken[place], "another place for the answer"))
        elif (found := against_file(file)) is not None:
            problems.append(Problem(os.fspath(file), found, "a file that can be written"))
        taken[place] = "another answer's place"
    if problems:
        raise ConfigError("the answer could not be written", problems)


def make_folder(folder: Path) -> None:
    """Make a folder for answers. Raises `ConfigError` where it cannot be written to."""
    if (found := against_folder(folder)) is not None:
        raise ConfigError(f"{folder} cannot be used", [Problem(os.fspath(folder), found, "a folder that can be written")])


def _place(file: Path) -> str:
    return os.path.realpath(file)


def _is_device(file: Path) -> bool:
    """Devices and pipes are left alone, opening one may have an effect."""
    return os.path.exists(file) and not os.path.isfile(file) and not os.path.isdir(file)
