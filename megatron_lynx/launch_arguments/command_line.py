"""Splits the command of a launch, and writes the command under a plan. Shell variables are not expanded.

CUDA_DEVICE_MAX_CONNECTIONS=1  torchrun --nproc-per-node 8 --nnodes 4  pretrain_gpt.py  --num-layers 32 ...
└────── environment ─────────┘ └───────────── launcher ─────────────┘  └── script ───┘  └── arguments ──┘
                                             32 GPUs

The arguments alone are accepted, too; then the number of GPUs is unknown.

under a plan   torchrun ... -m megatron_lynx.launch pretrain_gpt.py ARGUMENTS FLAGS --lynx-plan PLAN
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from types import MappingProxyType

from megatron_lynx.errors import ConfigError, Problem

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
HEADLINE = "the launch cannot be read"

LAUNCHER, TESTBED = ("-m", "megatron_lynx.launch"), ("-m", "tests.instruments")
RUNNERS = (LAUNCHER, TESTBED)
"""Modules that already run a script under a plan."""


@dataclass(frozen=True)
class CommandLine:
    environment: tuple[tuple[str, str], ...]
    """Variables set in front of the command."""
    launcher: tuple[str, ...]
    script: str | None
    arguments: tuple[str, ...]

    @property
    def gpus(self) -> int | None:
        """Processes of the job, one for each GPU; None if the launcher gives no number."""
        if any(PurePath(word).name in TORCHRUN for word in self.launcher):
            return _product(self._number("--nproc-per-node", 1), self._number("--nnodes", 1))
        if any(PurePath(word).name == "srun" for word in self.launcher):
            tasks = self._number("--ntasks", self._number("-n", None))
            per_node, nodes = self._number("--ntasks-per-node", None), self._number("--nodes", self._number("-N", None))
            return _product(per_node, nodes) if tasks is None else tasks
        return _whole(dict(self.environment).get("WORLD_SIZE", ""))

    def under_plan(
        self,
        plan: str,
        flags: Sequence[str],
        environment: Mapping[str, str] = MappingProxyType({}),
        runner: Sequence[str] = LAUNCHER,
    ) -> str:
        """The command under a plan; for a launch without a script, a sentence with the words to add.

        `flags`: words that the plan needs, quoted for a shell. `environment`, `runner`: used unless the launch has its own.
        """
        added = " ".join([*flags, "--lynx-plan", shlex.quote(plan)])
        variables = [f"{name}={shlex.quote(value)}" for name, value in {**environment, **dict(self.environment)}.items()]
        if self.script is None:
            return f"add to the launch: {added}" + (f", and to its environment: {' '.join(variables)}" if environment else "")
        launcher = self.launcher if self.launcher[-2:] in RUNNERS else (*self.launcher, *runner)
        words = shlex.join([*launcher, self.script, *without_plan(self.arguments)])
        return " ".join([*variables, words, added])

    def _number(self, option: str, otherwise: int | None) -> int | None:
        """The value of a launcher's option; None if it is not a number (`auto`, `2:4`)."""
        for index, word in enumerate(self.launcher):
            name, equals, value = word.partition("=")
            name = name.replace("_", "-")
            if name == option:
                following = self.launcher[index + 1] if index + 1 < len(self.launcher) else ""
                return _whole(value if equals else following)
        return otherwise


def command_line(words: Sequence[str]) -> CommandLine:
    """Split a launch. Raises `ConfigError` if it contains no script."""
    rest = list(words)
    environment = []
    while rest and (rest[0] == "env" or ASSIGNMENT.fullmatch(rest[0])):
        if found := ASSIGNMENT.fullmatch(rest.pop(0)):
            environment.append((found[1], found[2]))
    if not rest or rest[0].startswith("-"):
        return CommandLine(tuple(environment), (), None, tuple(rest))
    at = next((index for index, word in enumerate(rest) if word.endswith(".py")), None)
    if at is None:
        needed = "a Python script among its words, or the script's arguments alone"
        todo = "a shell script's variables are for the shell to fill in: give the command that it runs"
        raise ConfigError(HEADLINE, [Problem("launch", f"no word that ends in .py, beginning at {rest[0]!r}", needed, todo)])
    return CommandLine(tuple(environment), tuple(rest[:at]), rest[at], tuple(rest[at + 1 :]))


def without_plan(arguments: Sequence[str]) -> list[str]:
    kept = list(arguments)
    while "--lynx-plan" in kept:
        at = kept.index("--lynx-plan")
        del kept[at : at + 2]
    return [word for word in kept if not word.startswith("--lynx-plan=")]


def _product(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else first * second


def _whole(text: str) -> int | None:
    return int(text) if text.isdecimal() else None
