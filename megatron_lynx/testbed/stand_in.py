"""A stand-in: what takes the place of a library's objects on a machine that lacks them, and can be taken away again.

undo = ExitStack()
replace(undo, torch.cuda, "synchronize", ignore)      as often as needed
return StandIn(undo)                                  .remove(): the identical objects are back, newest first

Transformer Engine and Apex have compiled parts, which a machine without a GPU lacks:

the compiled library is installed                 it is used
it is not, and TESTBED_STAND_INS names a module   that module's `stand_in()` answers: this repository's tests have one
                                                  (`tests.instruments`)
it is not, and nothing is named                   Transformer Engine is hidden, so that Megatron does not fail at its import
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import MutableMapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_lynx.config.job import Job

ABSENT = object()


class StandIn:
    """The active stand-in. `remove()` (or leaving the `with` block) restores every replaced object, newest first."""

    def __init__(self, undo: ExitStack) -> None:
        self._undo = undo

    def remove(self) -> None:
        """Restore the identical objects. A second call does nothing."""
        self._undo.close()

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()


def replace(undo: ExitStack, owner: Any, name: str, new: Any) -> None:
    """Set `owner.name` and remember how to put back what its own `__dict__` held, which may be nothing."""
    own = vars(owner).get(name, ABSENT)
    setattr(owner, name, new)
    if own is ABSENT:
        undo.callback(delattr, owner, name)
    else:
        undo.callback(setattr, owner, name, own)


def replace_entry(undo: ExitStack, mapping: MutableMapping[str, Any], key: str, new: Any) -> None:
    """The same for an entry of a mapping, such as `os.environ` or `sys.modules`."""
    before = mapping.get(key, ABSENT)
    mapping[key] = new
    if before is ABSENT:
        undo.callback(mapping.pop, key)
    else:
        undo.callback(mapping.__setitem__, key, before)


def ignore(*args: Any, **kwargs: Any) -> None:
    """Answers a request for which a CPU has nothing to do."""


TRANSFORMER_ENGINE = "transformer_engine"

STAND_INS = "TESTBED_STAND_INS"
"""The environment variable that names a module with `stand_in() -> StandIn` and `attention_among_ranks(te=) -> type`."""


def named_stand_ins() -> Any:
    """The module that the environment names; None where it names none."""
    return importlib.import_module(name) if (name := os.environ.get(STAND_INS)) else None


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
    if (stand_ins := named_stand_ins()) is not None:
        undo.enter_context(stand_ins.stand_in())
    elif TRANSFORMER_ENGINE not in sys.modules and not has_compiled_extension():
        replace_entry(undo, sys.modules, TRANSFORMER_ENGINE, None)  # its import fails as that of a module that is not there
    return StandIn(undo)


def stood_in_for(job: Job) -> str | None:
    """The part of the job's layers that a stand-in computes on this machine, in words; None where all of it is real."""
    return "Transformer Engine's kernels" if job.model.uses_te and not has_compiled_extension() else None
