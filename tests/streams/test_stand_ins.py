"""Faults put in on purpose still fit what they replace. In `make quick`: whoever changes an argument of ours sees it at once."""

from __future__ import annotations

import inspect
from contextlib import ExitStack

import pytest

from tests import gpu_faults

from . import faults

CONTEXTS = [
    each
    for module in (faults, gpu_faults)
    for name, each in vars(module).items()
    if inspect.isgeneratorfunction(inspect.unwrap(each)) and not name.startswith("_")
]


@pytest.mark.parametrize("fault", CONTEXTS, ids=lambda fault: fault.__name__)
def test_a_fault_can_be_put_in(fault):
    with fault():
        pass


class Waits:
    def window(self, wait, proper, *, exchange=False):
        """Lost an argument."""


@pytest.mark.parametrize(
    "stand_in",
    [lambda self, address, wait, proper, *, exchange=False: None, lambda self, wait, proper: None],
    ids=["one too many", "one too few"],
)
def test_a_stand_in_with_other_arguments_is_refused(stand_in):
    """A story: `_window` lost an argument, and the stand-ins of two faults failed for that reason and showed no fault."""
    with ExitStack() as undo, pytest.raises(TypeError, match="argument"):
        faults.replace_function(undo, Waits, "window", stand_in)
    with ExitStack() as undo:
        faults.replace_function(undo, Waits, "window", lambda *args, **kwargs: None)
