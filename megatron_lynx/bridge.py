"""Trains Megatron-Bridge under a plan, from a script that `megatron_lynx.launch` did not start.

    from megatron.bridge.training.pretrain import pretrain

    with megatron_lynx.bridge.training_under("plan.yaml", check=2):
        pretrain(config, forward_step)

What is checked, said and written is what `--lynx-host bridge` does (docs/launching.md).
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
    """Inside, every training loop of Megatron-Bridge runs under the plan; behind it Bridge has its own functions back.

    Args:
        plan: the plan's file, the same on all ranks.
        check: as `--lynx-check`: in how many first steps stock runs on the same batch and every bit is compared, or `frames:N`.
        outcome: where to write what was predicted and measured, as JSON.
        trace: where to write a timeline of step 3.

    Raises:
        ConfigError: a value that does not read, or no Megatron-Bridge that could be imported.
        HookRefused: a Bridge without the functions that a launch goes through. What is wrong with the plan or the configuration
            ends all ranks with one message, before the model is built. A rank whose device has no more memory says why, and ends.
    """
    from megatron_lynx.apply import hook as holding
    from megatron_lynx.launch.ending import named_ending
    from megatron_lynx.launch.flags import BRIDGE, read_flags
    from megatron_lynx.launch.hosts import host_named
    from megatron_lynx.launch.launch import Launch
    from megatron_lynx.launch.script import held

    given = {"--lynx-plan": plan, "--lynx-check": check, "--lynx-outcome": outcome, "--lynx-trace": trace}
    words = [word for flag, value in given.items() if value is not None for word in (flag, str(value))]
    host = host_named(BRIDGE)
    host.find("training_under")
    launch = Launch(read_flags([*words, "--lynx-host", BRIDGE]), host)
    hooks = held(launch)
    try:
        with named_ending(lambda: launch.how_far), launch.memory.watching():
            yield
    finally:
        holding.give_back(hooks)
