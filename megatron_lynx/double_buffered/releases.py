"""Functions of megatron-core that decide where weights and gradients are stored, and when a gradient is complete."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_lynx.apply.releases import Held, installed_version, minor_of, releases_in
from megatron_lynx.errors import Problem

KNOWN = releases_in(Path(__file__).with_suffix(".json"))


def stale() -> Iterator[Problem]:
    """Yield the functions of the imported megatron-core that differ from the recorded ones."""
    version = installed_version()
    release = KNOWN.get(minor_of(version))
    if release is None:
        needed = f"one of {', '.join(f'{known}.x' for known in KNOWN)}"
        yield Problem("megatron.core", version, needed, "install one of these to train without flushes")
    else:
        yield from release.stale()


def held_here() -> list[Held]:
    """Return the rows of `megatron-lynx hooks`; empty if this release cannot train without flushes."""
    release = KNOWN.get(minor_of(installed_version()))
    return [] if release is None else list(release.rows(hook="double_buffered"))
