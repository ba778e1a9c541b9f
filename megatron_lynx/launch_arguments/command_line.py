"""Splits the command of a launch, and writes the command under a plan. Shell variables are not expanded.

CUDA_DEVICE_MAX_CONNECTIONS=1  torchrun --nproc-per-node 8 --nnodes 4  pretrain_gpt.py  --num-layers 32 ...
└────── environment ─────────┘ └───────────── launcher ─────────────┘  └── script ───┘  └── arguments ──┘
                                             32 GPUs

The arguments alone are accepted, too; then the number of GPUs is unknown.

under a plan   torchrun ... -m megatron_lynx.launch pretrain_gpt.py ARGUMENTS FLAGS --lynx-plan PLAN

Arguments are split into pieces: a flag and its words.

--num-layers 32    --swiglu    --recompute-modules moe layernorm    --use-mpi    --rollout 3 4       stray
└─── takes 1 ──┘   └ none ┘    └──────────── one or more ─────────┘ └─── unknown to Megatron ──┘     └ no flag's ┘

An unknown flag gets all words up to the next one that begins with `--`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from types import MappingProxyType

from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.launch_arguments.flag_table import FlagTable

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
HEADLINE = "the launch cannot be read"

LAUNCHER, TESTBED = ("-m", "megatron_lynx.launch"), ("-m", "tests.instruments")
RUNNERS = (LAUNCHER, TESTBED)
"""Modules that already run a script under a plan."""


@dataclass(frozen=True)
class CommandLine:
    """The parts of a launch."""

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

        Args:
            flags: words that the plan needs and the launch lacks, quoted for a shell.
            environment: variables that the plan needs, unless the launch sets them.
            runner: words that run the script, unless the launch has them.
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
    """The arguments without a plan named earlier."""
    kept = list(arguments)
    while "--lynx-plan" in kept:
        at = kept.index("--lynx-plan")
        del kept[at : at + 2]
    return [word for word in kept if not word.startswith("--lynx-plan=")]


def _product(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else first * second


def _whole(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


OURS = "--lynx-"

BY_STEPS = "--step-batch-size-schedule"
"""One word with blanks; scripts often lose its quotes."""
PAIR = re.compile(r"[\d.]+[A-Za-z]?:\d+")


@dataclass(frozen=True)
class Piece:
    """One flag with its values, or one word that belongs to no flag."""

    option: str | None
    """As written, without a value; None for a stray word."""
    values: tuple[str, ...]
    words: tuple[str, ...]
    """The whole piece as written."""

    @property
    def ours(self) -> bool:
        return self.option is not None and self.option.startswith(OURS)


def pieces(arguments: Sequence[str], table: FlagTable, releases: Sequence[str]) -> Iterator[Piece]:
    """Yield the pieces in order. The newest of `releases` that has a flag decides how many words it takes."""
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not is_flag(word):
            yield Piece(None, (), (word,))
            continue
        option, equals, value = word.partition("=")
        following = [] if equals else _up_to_next_flag(rest)
        taken = tuple(following[: _takes(option, len(following), table, releases)])
        del rest[: len(taken)]
        if option == BY_STEPS:
            while rest and PAIR.fullmatch(rest[0]):
                taken = (" ".join((*taken, rest.pop(0))),)
        yield Piece(option, (value,) if equals else taken, (word, *taken))


def is_flag(word: str) -> bool:
    return word.startswith("--") and len(word) > 2


def changed(
    arguments: Sequence[str],
    table: FlagTable,
    releases: Sequence[str],
    *,
    without: Collection[str] = (),
    setting: Mapping[str, Sequence[str]] | None = None,
) -> tuple[str, ...]:
    """The arguments without the flags that set the names of `without`, and with those of `setting` (values by option) replaced or
    added
    at the end.
    """
    given = dict(setting or {})
    words: list[str] = []
    for piece in pieces(arguments, table, releases):
        flag = None if piece.option is None else table.newest(piece.option, releases)
        if flag is not None and flag.sets in without:
            continue
        if piece.option is not None and piece.option in (setting or {}):
            words += [piece.option, *given.pop(piece.option)] if piece.option in given else []
            continue
        words += piece.words
    return (*words, *(word for option, values in given.items() for word in (option, *values)))


def _takes(option: str, following: int, table: FlagTable, releases: Sequence[str]) -> int:
    if option.startswith(OURS):
        return min(1, following)
    flag = table.newest(option, releases) or table.newest(option)
    return following if flag is None or not isinstance(flag.takes, int) else flag.takes


def _up_to_next_flag(words: Sequence[str]) -> list[str]:
    return list(words[: next((index for index, word in enumerate(words) if is_flag(word)), len(words))])
