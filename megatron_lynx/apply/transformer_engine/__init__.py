"""Which Transformer Engine is installed, what this package knows of it (`releases`), and how plans treat its layers.

`norm` regenerates the norm inside a linear without the linear, `fp8` makes replays in FP8 leave no trace.
"""

from __future__ import annotations

from megatron_lynx.apply.releases import table_of
from megatron_lynx.apply.transformer_engine.release import TeRelease
from megatron_lynx.apply.transformer_engine.releases import KNOWN
from megatron_lynx.errors import HookRefused, Problem


def installed_te() -> str:
    """The version of the Transformer Engine that is imported, e.g. `2.12.0`. Raises `HookRefused` where it cannot be imported."""
    try:
        import transformer_engine.pytorch
    except (ImportError, OSError, RuntimeError) as missing:  # it looks for its libraries and loads them
        problem = Problem("transformer_engine", str(missing), "it, to be imported", "install it")
        raise HookRefused("Transformer Engine cannot be imported", [problem]) from None
    return str(transformer_engine.__version__)


def present_te() -> TeRelease:
    """The table for the Transformer Engine that is imported.

    Raises `HookRefused` for a release that is not known, with every function that moved since the nearest one that is.
    """
    todo = "install one of these, or launch with --transformer-impl local"
    return table_of(installed_te(), KNOWN, "transformer_engine", "Transformer Engine", todo)


__all__ = ["KNOWN", "TeRelease", "installed_te", "present_te"]
