"""Holding on to Megatron: what a plan means for a live run, and the hooks that carry it out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_lynx.apply.installation import Installation, install

__all__ = ["Installation", "install"]


def __getattr__(name: str) -> Any:
    """Found when asked for: kinds of layers hold on with parts of this package, and installing needs all kinds."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megatron_lynx.apply import installation

    return getattr(installation, name)
