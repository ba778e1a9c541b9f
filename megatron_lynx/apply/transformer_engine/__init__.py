"""Releases of Transformer Engine whose layers this package can hold on to, one literal table each, and what is done with them.

In FP8 (`fp8`) as in bf16, with recipes that have one scale per tensor.
"""

from __future__ import annotations

from megatron_lynx.apply.releases import table_of
from megatron_lynx.apply.transformer_engine.release import TeRelease
from megatron_lynx.apply.transformer_engine.te_2_9 import TE_2_9
from megatron_lynx.apply.transformer_engine.te_2_10 import TE_2_10
from megatron_lynx.apply.transformer_engine.te_2_11 import TE_2_11
from megatron_lynx.apply.transformer_engine.te_2_12 import TE_2_12
from megatron_lynx.apply.transformer_engine.te_2_13 import TE_2_13
from megatron_lynx.apply.transformer_engine.te_2_14 import TE_2_14
from megatron_lynx.apply.transformer_engine.te_2_15 import TE_2_15
from megatron_lynx.apply.transformer_engine.te_2_16 import TE_2_16
from megatron_lynx.apply.transformer_engine.te_2_17 import TE_2_17
from megatron_lynx.apply.transformer_engine.te_2_18 import TE_2_18
from megatron_lynx.apply.transformer_engine.te_2_19 import TE_2_19
from megatron_lynx.apply.transformer_engine.te_2_20 import TE_2_20
from megatron_lynx.errors import HookRefused, Problem

RELEASES = (TE_2_9, TE_2_10, TE_2_11, TE_2_12, TE_2_13, TE_2_14, TE_2_15, TE_2_16, TE_2_17, TE_2_18, TE_2_19, TE_2_20)
KNOWN: dict[str, TeRelease] = {release.version: release for release in RELEASES}


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
