"""Removable replacements for library objects that this machine lacks.

Transformer Engine and Apex have compiled parts. Without a GPU that runs them, the module that TESTBED_STAND_INS names replaces
them (this repository's tests have one, `tests.instruments`); without that variable Transformer Engine is hidden, so that
Megatron's import does not fail.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import MutableMapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_lynx.config.job import Job

ABSENT = object()


def replace(undo: ExitStack, owner: Any, name: str, new: Any) -> None:
    entry = vars(owner).get(name, ABSENT)
    setattr(owner, name, new)
    if entry is ABSENT:
        undo.callback(delattr, owner, name)
    else:
        undo.callback(setattr, owner, name, entry)


def replace_entry(undo: ExitStack, mapping: MutableMapping[str, Any], key: str, new: Any) -> None:
    before = mapping.get(key, ABSENT)
    mapping[key] = new
    if before is ABSENT:
        undo.callback(mapping.pop, key)
    else:
        undo.callback(mapping.__setitem__, key, before)


def ignore(*args: Any, **kwargs: Any) -> None:
    """A no-op for requests that need nothing on a CPU."""


TRANSFORMER_ENGINE = "transformer_engine"

STAND_INS = "TESTBED_STAND_INS"
"""Environment variable with the name of a module that has `stand_in() -> ExitStack` and `attention_among_ranks(te=) -> type`."""


def named_stand_ins() -> Any:
    return importlib.import_module(name) if (name := os.environ.get(STAND_INS)) else None


def transformer_engine_can_run() -> bool:
    return importlib.util.find_spec(TRANSFORMER_ENGINE) is not None and (has_compiled_extension() or STAND_INS in os.environ)


def has_compiled_extension() -> bool:
    spec = importlib.util.find_spec(TRANSFORMER_ENGINE)
    folders = [] if spec is None else spec.submodule_search_locations or []
    return any(True for folder in folders for _ in Path(folder).parent.glob("**/transformer_engine_torch*.so"))


def stand_in_for_compiled_parts() -> ExitStack:
    """Replace or hide missing compiled parts until the returned stack is closed. Call before importing Megatron."""
    undo = ExitStack()
    if (stand_ins := named_stand_ins()) is not None:
        undo.enter_context(stand_ins.stand_in())
    elif TRANSFORMER_ENGINE not in sys.modules and not has_compiled_extension():
        replace_entry(undo, sys.modules, TRANSFORMER_ENGINE, None)  # makes its import fail as if it were not installed
    return undo


def stood_in_for(job: Job) -> str | None:
    """Name the part of the job's layers that a stand-in computes on this machine; None if there is none."""
    return "Transformer Engine's kernels" if job.model.uses_te and not has_compiled_extension() else None
