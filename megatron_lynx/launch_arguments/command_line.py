"""Splits the command of a launch, and writes the command under a plan. Shell variables are not expanded.

CUDA_DEVICE_MAX_CONNECTIONS=1  torchrun --nproc-per-node 8 --nnodes 4  pretrain_gpt.py  --num-layers 32 ...
└────── environment ─────────┘ └───────────── launcher ─────────────┘  └── script ───┘  └── arguments ──┘"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any

from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.launch_arguments.given import SHELL, Flag, FlagTable, Value, in_range
from megatron_lynx.whole_file import text_in

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
HEADLINE = "the launch cannot be read"
LAUNCHER, TESTBED = ("-m", "megatron_lynx.launch"), ("-m", "tests.instruments")
RUNNERS = (LAUNCHER, TESTBED)


@dataclass(frozen=True)
class CommandLine:
    environment: tuple[tuple[str, str], ...]
    launcher: tuple[str, ...]
    script: str | None
    arguments: tuple[str, ...]

    @property
    def gpus(self) -> int | None:
        """Processes of the job, one for each GPU; None if the launcher gives no number."""
        names = {PurePath(word).name for word in self.launcher}
        if not names.isdisjoint(TORCHRUN):
            each, nodes = self._number("--nproc-per-node", otherwise=1), self._number("--nnodes", otherwise=1)
        elif "srun" in names and (tasks := self._number("--ntasks", "-n")) is None:
            each, nodes = self._number("--ntasks-per-node"), self._number("--nodes", "-N")
        else:
            return tasks if "srun" in names else whole_number(dict(self.environment).get("WORLD_SIZE"))
        return None if each is None or nodes is None else each * nodes

    def under_plan(
        self,
        plan: str,
        flags: Sequence[str],
        environment: Mapping[str, str] = MappingProxyType({}),
        runner: Sequence[str] = LAUNCHER,
    ) -> str:
        """`flags`: words that the plan needs, quoted for a shell. `environment`, `runner`: used unless the launch has its own."""
        added = " ".join([*flags, "--lynx-plan", shlex.quote(plan)])
        variables = [f"{name}={shlex.quote(value)}" for name, value in {**environment, **dict(self.environment)}.items()]
        if self.script is None:
            return f"add to the launch: {added}" + (f", and to its environment: {' '.join(variables)}" if environment else "")
        launcher = self.launcher if self.launcher[-2:] in RUNNERS else (*self.launcher, *runner)
        words = shlex.join([*launcher, self.script, *without_option(self.arguments, "--lynx-plan")[0]])
        return " ".join([*variables, words, added])

    def _number(self, *options: str, otherwise: int | None = None) -> int | None:
        """The value of the first of these launcher's options that is given; None if it is not a number (`auto`, `2:4`)."""
        words = [re.sub(r"^--[^=]+", lambda match: match[0].replace("_", "-"), word) for word in self.launcher]
        said = next((value for option in options if (value := without_option(words, option)[1]) is not None), None)
        return otherwise if said is None else whole_number(said)


def command_line(words: Sequence[str]) -> CommandLine:
    """Split a launch. Raises `ConfigError` if it contains no script."""
    rest = list(words)
    environment = []
    while rest and (rest[0] == "env" or ASSIGNMENT.fullmatch(rest[0])):
        if assignment := ASSIGNMENT.fullmatch(rest.pop(0)):
            environment.append((assignment[1], assignment[2]))
    if not rest or rest[0].startswith("-"):
        return CommandLine(tuple(environment), (), None, tuple(rest))
    at = next((index for index, word in enumerate(rest) if word.endswith(".py")), None)
    if at is None:
        needed = "a Python script among its words, or the script's arguments alone"
        todo = "a shell script's variables are for the shell to fill in: give the command that it runs"
        raise ConfigError(HEADLINE, [Problem("launch", f"no word that ends in .py, beginning at {rest[0]!r}", needed, todo)])
    return CommandLine(tuple(environment), tuple(rest[:at]), rest[at], tuple(rest[at + 1 :]))


def without_option(words: Sequence[str], option: str) -> tuple[list[str], str | None]:
    """The words without an option of ours and its value, and the last value; None without the option."""
    kept, value = list(words), None
    for index in reversed([index for index, word in enumerate(kept) if word.partition("=")[0] == option]):
        said = kept.pop(index).partition("=")
        given = said[2] if said[1] else kept.pop(index) if index < len(kept) else ""
        value = given if value is None else value
    return kept, value


def whole_number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


OPTION = "--launch-file"
NEEDED = "a launch, one word a line; comments begin with '# '"
TODO = "a shell writes one so: printf '%s\\n' torchrun ... > FILE"
CLUSTER = re.compile(r"#\s+cluster:\s*(\S+)")
SHELL_LINE = re.compile(r"\S+\s+--\w|\\$")


@dataclass(frozen=True)
class LaunchFile:
    words: tuple[str, ...]
    cluster: str | None = None


def read_launch_file(path: Path) -> LaunchFile:
    """Raises `ConfigError` for a file that cannot be read, is empty, or does not have one word a line."""
    lines = text_in(path, NEEDED, where=f"{OPTION} {path}", headline=HEADLINE, todo=TODO).splitlines()
    comments = [line for line in lines if line == "#" or line.startswith("# ")]
    words = tuple(line for line in lines if line.strip() and line not in comments)
    if not words:
        raise _refused(path, "no words" if lines else "an empty file")
    if (line := next(filter(SHELL_LINE.search, words), None)) is not None:
        raise _refused(path, f"a line of several words, {line if len(line) < 40 else f'{line[:37]}...'!r}")
    named = [match[1] for line in comments if (match := CLUSTER.match(line))]
    return LaunchFile(words, named[-1] if named else None)


def _refused(path: Path, content: str) -> ConfigError:
    return ConfigError(HEADLINE, [Problem(f"{OPTION} {path}", content, NEEDED, TODO)])


def value_of(text: str) -> Any:
    """A value on a command line: a Python literal, a word of YAML, a list of words, or text."""
    words = {"true": True, "false": False, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return [one.strip() for one in text[1:-1].split(",")] if text.startswith("[") and text.endswith("]") else text


Entry = tuple[str, str, Any]
"""(place as the user wrote it, Megatron's name, value)."""


def values_of(entries: Iterable[Entry], table: FlagTable, release: str, problems: list[Problem]) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for place, name, value in entries:
        flags = table.of_name.get(name, ())
        flag = next((flag for flag in flags if release in flag.releases), None) or next(iter(flags), None)
        if flag is not None and value is not None:
            values[name] = Value(flag, place, checked(flag, place, value, problems))
    return values


KINDS = {"int": (int, "a whole number"), "float": (int | float, "a number"), "text": (str | int | float, "text")}


def checked(flag: Flag, where: str, value: Any, problems: list[Problem]) -> Any:
    """The value as its flag would give it; otherwise None, with a problem added to `problems`."""
    kind, needed = (bool, "true or false") if flag.takes == 0 and isinstance(flag.to, bool) else KINDS[flag.type]
    ones = value if isinstance(value, list) and flag.takes not in (0, 1) else [value]
    if not all(isinstance(one, kind) and isinstance(one, bool) <= (kind is bool) for one in ones):
        todo = "Megatron would fill the variable in: write the number" if SHELL.search(str(value)) else ""
        problems.append(Problem(where, repr(value), needed, todo))
        return None
    if isinstance(value, int | float):
        is_text = flag.type == "text" and flag.takes == 1 and flag.is_read
        return str(value) if is_text else in_range(flag, where, value, problems)
    return value
