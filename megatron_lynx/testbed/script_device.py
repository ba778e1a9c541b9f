"""Answers what Megatron's training *scripts* ask of a GPU machine, beyond what `cpu_device` answers for megatron.core.

    asked                                            answered by
    torch.cuda.is_available(), device_count()        yes, as many as this machine has ranks: Megatron refuses to start otherwise
    device properties, capability, memory            those of a card that has none of what is optional
    make, for the dataset helper                     nothing to do where `missing_modules` finds one that is built

    how much memory there is                         no bound, or the one of `device_memory`

    processes for writing checkpoints                forked: one that is spawned imports torch and the script again, and could not
                                                       import the script here

Found by removing each alone and running the scripts of 0.16 to 0.19 on a CPU. To be in place before Megatron is imported.
"""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing import context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron_lynx.testbed.cpu_device import OneGenerator, stand_in_for_cuda, stay
from megatron_lynx.testbed.device_memory import limit_memory
from megatron_lynx.testbed.missing_modules import helper_spec, stand_in_for_missing_modules
from megatron_lynx.testbed.stand_in import StandIn, ignore, replace, replace_entry

CAPABILITY = (8, 0)
"""Compute capability that is claimed: new enough for what Megatron requires, too old for what is optional."""


def stand_in_for_gpu_machine() -> StandIn:
    """Let this process run Megatron's training scripts without a GPU, until the returned handle is removed.

    Of a second call while one is active only the limit of memory is new.

    Raises:
        ConfigError: this machine has a working GPU, which is then the one to use; or a limit of memory that does not read.
    """
    undo = ExitStack()
    if not isinstance(torch.cuda.default_generators, OneGenerator):
        undo.enter_context(stand_in_for_cuda())
        answer_which_device(undo)
        undo.enter_context(stand_in_for_missing_modules(apex=True))
        build_nothing(undo)
        fork_children(undo)
    limit_memory(undo)
    return StandIn(undo)


def answer_which_device(undo: ExitStack) -> None:
    """There is a device; what it is like; and `.pin_memory()` of what lives on it."""
    properties = SimpleNamespace(name="CPU", major=CAPABILITY[0], minor=CAPABILITY[1], total_memory=0, multi_processor_count=1)
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_name": lambda device=None: properties.name,
        "memory_stats": lambda device=None: {},
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "max_memory_reserved": lambda device=None: 0,
        "reset_peak_memory_stats": ignore,
    }
    for name, answer in answers.items():
        replace(undo, torch.cuda, name, answer)
    replace(undo, torch.Tensor, "pin_memory", stay)


def build_nothing(undo: ExitStack) -> None:
    """`make` in the folder of the dataset helper has nothing to do where `missing_modules` finds one that is built."""
    original = subprocess.run

    @functools.wraps(original)
    def run(command: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(command, list) and command[:2] == ["make", "-C"] and helper_spec(Path(command[2])) is not None:
            return subprocess.CompletedProcess(command, returncode=0)
        return original(command, *args, **kwargs)

    replace(undo, subprocess, "run", run)


def fork_children(undo: ExitStack) -> None:
    """Processes that are to be spawned are forked, as Megatron forks those that write asynchronously."""
    replace_entry(undo, context._concrete_contexts, "spawn", context._concrete_contexts["fork"])  # type: ignore[attr-defined]
