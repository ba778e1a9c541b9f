"""Which release of megatron-core is installed, and what this package knows of it: only known releases can run a plan."""

from __future__ import annotations

from megatron_lynx.apply.releases.core import KNOWN
from megatron_lynx.apply.releases.release import Release, fingerprint, minor_of, number_of, table_of
from megatron_lynx.errors import HookRefused, Problem


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


__all__ = ["KNOWN", "Release", "fingerprint", "installed_version", "minor_of", "number_of", "present_release", "table_of"]
