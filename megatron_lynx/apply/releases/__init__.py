"""Releases of megatron-core that this package can hold on to, one literal table each."""

from __future__ import annotations

from megatron_lynx.apply.releases.core_0_15 import CORE_0_15
from megatron_lynx.apply.releases.core_0_16 import CORE_0_16
from megatron_lynx.apply.releases.release import Release, fingerprint
from megatron_lynx.errors import HookRefused, Problem

KNOWN: dict[str, Release] = {release.version: release for release in (CORE_0_15, CORE_0_16)}


def installed_version() -> str:
    """The version of the megatron-core that is imported, e.g. `0.16.1`."""
    from megatron.core import __version__

    return str(__version__)


def present_release() -> Release:
    """The table for the megatron-core that is imported. Raises `HookRefused` for a release that is not known."""
    version = installed_version()
    release = KNOWN.get(".".join(version.split(".")[:2]))
    if release is None:
        raise HookRefused(
            "this release of megatron-core is not known",
            [Problem("megatron.core", version, f"one of {', '.join(f'{known}.x' for known in KNOWN)}", "install one of these")],
        )
    return release


__all__ = ["KNOWN", "Release", "fingerprint", "installed_version", "present_release"]
