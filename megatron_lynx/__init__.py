"""megatron-lynx: activation memory made cheap by recomputation that overlaps with communication.

    with megatron_lynx.install(model, megatron_lynx.load_plan("plan.yaml")):
        train()

Importing this package imports nothing else; each name is loaded at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_lynx.version import __version__

if TYPE_CHECKING:
    from megatron_lynx.apply.hooks.head_in_pieces import LogitsInPieces
    from megatron_lynx.apply.installation import Installation, install
    from megatron_lynx.plan import Plan, load_plan

__all__ = ["load_plan", "install", "Plan", "Installation", "LogitsInPieces", "__version__"]

_HOMES = {
    "load_plan": "plan",
    "Plan": "plan",
    "install": "apply.installation",
    "Installation": "apply.installation",
    "LogitsInPieces": "apply.hooks.head_in_pieces",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
