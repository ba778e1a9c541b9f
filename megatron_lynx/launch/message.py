"""Messages of the launcher go to standard error, where they do not mix with what the script prints."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Print a line with a single write. `print` makes two, between which another rank's line may come."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
