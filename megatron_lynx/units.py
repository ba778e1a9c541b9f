"""Converts seconds and bytes, the package's units, to text."""

from __future__ import annotations

KIB = 1024
MIB = 1024**2
GIB = 1024**3

SECOND_DIGITS = 12
"""Seconds are compared to a picosecond, because sums of floats depend on their order."""


def format_bytes(count: float) -> str:
    """`1536` -> `1.5 KiB`: binary units, as device memory is sold and reported."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def format_seconds(seconds: float) -> str:
    """`0.0123` -> `12.3 ms`. Less than a picosecond is 0."""
    seconds = round(seconds, SECOND_DIGITS)
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us" if seconds else "0 s"


def speed_in_words(ours_s: float, other_s: float) -> str:
    """`1.39 times as fast as`, for steps of ours and of another setting."""
    ratio = other_s / ours_s
    if abs(ratio - 1) < 0.005:
        return "as fast as"
    return f"{ratio:.2f} times as fast as" if ratio > 1 else f"slower, by a factor of {1 / ratio:.2f}, than"
