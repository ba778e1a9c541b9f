"""Which Transformer Engine is installed, which of its functions plans rely on, and how plans treat its layers.

`norm` regenerates the norm inside a linear without the linear, `fp8` makes recomputations in FP8 leave no trace.
"""

from __future__ import annotations

from pathlib import Path

from megatron_lynx.apply.releases import Release, releases_in, table_of
from megatron_lynx.errors import HookRefused, Problem

KNOWN = releases_in(Path(__file__).with_name("releases.json"))


def installed_te() -> str:
    """The version of the Transformer Engine that is imported, e.g. `2.12.0`. Raises `HookRefused` where it cannot be imported."""
    try:
        import transformer_engine.pytorch
    except (ImportError, OSError, RuntimeError) as missing:  # it looks for its libraries and loads them
        problem = Problem("transformer_engine", str(missing), "it, to be imported", "install it")
        raise HookRefused("Transformer Engine cannot be imported", [problem]) from None
    return str(transformer_engine.__version__)


def present_te() -> Release:
    """The table for the Transformer Engine that is imported. Raises `HookRefused` for an unknown release."""
    todo = "install one of these, or launch with --transformer-impl local"
    return table_of(installed_te(), KNOWN, "transformer_engine", "Transformer Engine", todo)
