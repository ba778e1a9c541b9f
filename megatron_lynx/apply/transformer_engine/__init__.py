"""Known releases of Transformer Engine, and how plans treat its layers.

`norm` recomputes the norm inside a linear without the linear, `fp8` makes recomputations in FP8 free of side effects.
"""

from __future__ import annotations

from pathlib import Path

from megatron_lynx.apply.releases import Release, releases_in, table_of
from megatron_lynx.errors import HookRefused, Problem

KNOWN = releases_in(Path(__file__).with_name("releases.json"))


def installed_te() -> str:
    """The version of the imported Transformer Engine, e.g. `2.12.0`. Raises `HookRefused` if it cannot be imported."""
    try:
        import transformer_engine.pytorch
    except (ImportError, OSError, RuntimeError) as missing:  # it looks for its libraries and loads them
        problem = Problem("transformer_engine", str(missing), "it, to be imported", "install it")
        raise HookRefused("Transformer Engine cannot be imported", [problem]) from None
    return str(transformer_engine.__version__)


def present_te() -> Release:
    """The release of the imported Transformer Engine. Raises `HookRefused` if it is unknown."""
    todo = "install one of these, or launch with --transformer-impl local"
    return table_of(installed_te(), KNOWN, "transformer_engine", "Transformer Engine", todo)
