"""Trains Megatron-Bridge under a plan, from a script that `megatron_lynx.launch` did not start.

    from megatron.bridge.training.pretrain import pretrain

    with megatron_lynx.bridge.training_under("plan.yaml", check=2):
        pretrain(config, forward_step)

Checks, messages and files are those of `--lynx-host bridge` (docs/launching.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike


@contextmanager
def training_under(
    plan: str | PathLike[str],
    *,
    check: int | str | None = None,
    outcome: str | PathLike[str] | None = None,
    trace: str | PathLike[str] | None = None,
) -> Iterator[None]:
    """Run every training loop of Megatron-Bridge in the block under the plan; restore Bridge's functions after it.

    `plan`: its file, the same on all ranks. `check`: as `--lynx-check`, a number of steps or `frames:N`. `outcome`: a JSON file
    for predicted and measured figures. `trace`: a file for a timeline of step 3.

    Raises `ConfigError` for an invalid value, or if Megatron-Bridge cannot be imported, and `HookRefused` for one without the
    functions of a launch. An invalid plan or configuration ends all ranks with one message, before the model is built.
    """
    from megatron_lynx.launch.hosts import host_named
    from megatron_lynx.launch.launch import Launch, in_force
    from megatron_lynx.launch.script import BRIDGE, read_flags

    given = {"--lynx-plan": plan, "--lynx-check": check, "--lynx-outcome": outcome, "--lynx-trace": trace}
    words = [word for flag, value in given.items() if value is not None for word in (flag, str(value))]
    launch = Launch(read_flags([*words, "--lynx-host", BRIDGE]), host_named(BRIDGE))
    launch.host.find("training_under")
    with in_force(launch):
        yield
