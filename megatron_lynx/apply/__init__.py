"""Installs plans in a live run: hooks on Megatron, and the checks before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_lynx.apply.installation import Installation, install

__all__ = ["Installation", "install"]


def __getattr__(name: str) -> Any:
    """Imported at first use, because `megatron_lynx.kinds` imports parts of this package."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megatron_lynx.apply import installation

    return getattr(installation, name)
