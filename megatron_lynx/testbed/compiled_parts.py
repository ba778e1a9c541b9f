"""Compiled parts of Transformer Engine and Apex, which a machine without a GPU does not have, and who stands in for them.

the compiled library is installed                 it is used
it is not, and TESTBED_STAND_INS names a module   that module's `stand_in()` answers: this repository's tests have one
                                                  (`tests.instruments`)
it is not, and nothing is named                   Transformer Engine is hidden: Megatron goes without it, as where it is not
                                                  installed, instead of failing at its import
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from contextlib import ExitStack
from pathlib import Path

from megatron_lynx.testbed.stand_in import StandIn, replace_entry

TRANSFORMER_ENGINE = "transformer_engine"

STAND_INS = "TESTBED_STAND_INS"
"""The environment variable that names a module with `stand_in() -> StandIn`; without it nothing stands in."""


def transformer_engine_can_run() -> bool:
    """Whether Transformer Engine is on the import path, with its compiled library or with somebody who stands in for it."""
    return importlib.util.find_spec(TRANSFORMER_ENGINE) is not None and (has_compiled_extension() or STAND_INS in os.environ)


def has_compiled_extension() -> bool:
    """Whether a library lies where Transformer Engine looks for one: beside its Python."""
    found = importlib.util.find_spec(TRANSFORMER_ENGINE)
    folders = [] if found is None else found.submodule_search_locations or []
    return any(True for folder in folders for _ in Path(folder).parent.glob("**/transformer_engine_torch*.so"))


def stand_in_for_compiled_parts() -> StandIn:
    """What is missing is answered or hidden until the returned handle is removed. To be in place before Megatron is imported."""
    undo = ExitStack()
    if name := os.environ.get(STAND_INS):
        undo.enter_context(importlib.import_module(name).stand_in())
    elif TRANSFORMER_ENGINE not in sys.modules and not has_compiled_extension():
        replace_entry(undo, sys.modules, TRANSFORMER_ENGINE, None)  # its import fails as that of a module that is not there
    return StandIn(undo)
