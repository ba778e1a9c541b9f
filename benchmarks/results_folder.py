"""The folder that a benchmark is told to write into: made, and tried, before anything is measured.

parser.add_argument("-o", "--output", type=results_folder)
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path

from megatron_lynx.writable import against_folder


def results_folder(text: str) -> Path:
    """The folder, which is there now. Raises `ArgumentTypeError`, which argparse tells, where nothing can be written into it."""
    folder = Path(text)
    if (found := against_folder(folder)) is not None:
        raise ArgumentTypeError(f"{folder}: found {found}, needed a folder that can be written")
    return folder
