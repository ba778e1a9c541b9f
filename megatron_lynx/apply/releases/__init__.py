"""Releases of megatron-core that this package can hold on to, one literal table each."""

from __future__ import annotations

from megatron_lynx.apply.releases.core_0_15 import CORE_0_15
from megatron_lynx.apply.releases.core_0_16 import CORE_0_16
from megatron_lynx.apply.releases.core_0_17 import CORE_0_17
from megatron_lynx.apply.releases.core_0_18 import CORE_0_18
from megatron_lynx.apply.releases.core_0_19 import CORE_0_19
from megatron_lynx.apply.releases.release import Release, fingerprint, minor_of, table_of
from megatron_lynx.errors import HookRefused, Problem

KNOWN: dict[str, Release] = {release.version: release for release in (CORE_0_15, CORE_0_16, CORE_0_17, CORE_0_18, CORE_0_19)}


def installed_version() -> str:
    """The version of the megatron-core that is imported, e.g. `0.16.1`. Raises `HookRefused` where it cannot be imported."""
    try:
        from megatron.core import __version__
    except ModuleNotFoundError as missing:  # 0.18 and 0.19 import triton, which torch for CPUs does not bring
        problem = Problem("megatron.core", f"no module {missing.name}", "it, to be imported", "install it")
        raise HookRefused("megatron-core cannot be imported", [problem]) from None
    return str(__version__)


def present_release() -> Release:
    """The table for the megatron-core that is imported.

    Raises `HookRefused` for a release that is not known, with every function that moved since the nearest one that is.
    """
    return table_of(installed_version(), KNOWN, "megatron.core", "megatron-core", "install one of these")


__all__ = ["KNOWN", "Release", "fingerprint", "installed_version", "minor_of", "present_release", "table_of"]
