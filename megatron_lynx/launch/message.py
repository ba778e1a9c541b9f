"""What the launcher says: on standard error, where it does not mix with what the script prints."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """In one write: `print` makes two, and another rank's line may come between."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
