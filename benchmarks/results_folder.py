"""The folder that a benchmark is told to write into: made, and tried, before anything is measured.

parser.add_argument("-o", "--output", type=results_folder)
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, ArgumentTypeError
from pathlib import Path

from megatron_lynx.whole_file import against_folder


def results_folder(text: str) -> Path:
    """The folder, which is there now. Raises `ArgumentTypeError`, which argparse tells, where nothing can be written into it."""
    folder = Path(text)
    if (found := against_folder(folder)) is not None:
        raise ArgumentTypeError(f"{folder}: found {found}, needed a folder that can be written")
    return folder


def add_out(parser: ArgumentParser, default: str) -> None:
    """`--out`, for benchmarks that run on a machine with a GPU, which may say in $OUT what comes back from it."""
    folder, said = os.environ.get("OUT", default), f"for the results; by default $OUT, else {default}"
    parser.add_argument("--out", metavar="FOLDER", type=results_folder, default=folder, help=said)
