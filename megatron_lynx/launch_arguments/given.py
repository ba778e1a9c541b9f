"""Reads the values of a launch, from arguments or Megatron's YAML form, by Megatron's names.

--num-layers 32 --swiglu --lr 3e-4  ─┐
                                     ├─> {num_layers: 32, swiglu: True, lr: 0.0003}, and the releases that accept all of them
language_model: {num_layers: 32 ...} ─┘

Values become `Fact`s about the job, which name their flag.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lynx.errors import Problem
from megatron_lynx.launch_arguments.command_line import is_flag, pieces
from megatron_lynx.launch_arguments.flag_table import Flag, FlagTable

MISTYPED = 0.9
"""Similarity, from 0 to 1, of a word and its misspelling by a letter or two."""

SHELL = re.compile(r"\$[A-Za-z_{(@*1-9]")

AT_LEAST_ONE = frozenset(
    {
        *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "seq_length", "micro_batch_size"),
        *("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size", "make_vocab_size_divisible_by"),
        *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "global_batch_size", "vocab_size"),
        "ddp_bucket_size",
        "ddp_num_buckets",
    }
)
"""Sizes and divisors, which must not be 0."""

OPEN = frozenset({"optimizer"})
"""Flags whose values are not limited to Megatron's choices: later code knows more."""


@dataclass(frozen=True)
class Value:
    flag: Flag
    said: str
    """The flag as written, or the key in a file."""
    value: Any


@dataclass(frozen=True)
class Given:
    """All given values. The last of several counts, as in Megatron."""

    values: Mapping[str, Value]
    releases: tuple[str, ...]
    """The releases that accept every flag of the launch, oldest first; never empty."""
    table: FlagTable
    unknown: tuple[str, ...] = ()
    """Flags that Megatron does not have, each with its words, and unknown values of flags that do not matter. A fork may have
    them.
    """
    packed: str = ""
    """The setting of a data set that packs sequences, if no flag does."""

    @property
    def release(self) -> str:
        """The newest release, whose defaults are used."""
        return self.releases[-1]

    def __getitem__(self, name: str) -> Any:
        """Megatron's value under a name; its default if the given one could not be read."""
        said = self.values.get(name)
        return self.table.default(name, self.release) if said is None or said.value is None else said.value

    def unknown_value(self, option: str) -> str | None:
        """The words after a flag that Megatron does not have; None if it is not given."""
        return next((words.removeprefix(option).strip() for words in self.unknown if words.split()[0] == option), None)

    def origin(self, *names: str) -> str:
        """The first of these names that was given, as written."""
        return next((self.values[name].said for name in names if name in self.values), "Megatron's default")


def given_arguments(arguments: Sequence[str], table: FlagTable) -> tuple[Given, list[Problem]]:
    """Read arguments, and return their values and problems."""
    options = [word.partition("=")[0] for word in arguments if is_flag(word)]
    options = [option for option in options if table.newest(option) is not None]
    releases, problems = _common(options, table)
    values: dict[str, Value] = {}
    unknown: list[str] = []
    for piece in pieces(arguments, table, releases):
        flag = None if piece.option is None else table.newest(piece.option, releases)
        if piece.option is None:
            problems.append(_stray(piece.words[0]))
        elif flag is not None:
            values[flag.sets] = Value(flag, piece.option, _value(flag, piece.option, piece.values, problems, unknown))
        elif not piece.ours:
            unknown.append(" ".join(piece.words))
    return Given(values, releases, table, tuple(unknown)), problems


def _common(options: Sequence[str], table: FlagTable) -> tuple[tuple[str, ...], list[Problem]]:
    """The releases that have all of these options; if there is none, the newest, with a problem."""
    narrow: dict[tuple[str, ...], str] = {}
    for option in options:
        narrow.setdefault(table.releases_of(option), option)
    common = tuple(release for release in table.releases if all(release in releases for releases in narrow))
    if common:
        return common, []
    text = ", ".join(f"{option} ({' '.join(of)})" for of, option in narrow.items() if len(of) < len(table.releases))
    problem = Problem("launch", f"flags that no one release of Megatron takes together: {text}", "flags of one release")
    return table.releases[-1:], [problem]


def _stray(word: str) -> Problem:
    todo = "let the shell fill its variables in" if SHELL.search(word) else ""
    return Problem("launch", f"the word {word!r}", "a flag, or a value behind one", todo)


def mistyped(option: str, table: FlagTable) -> str | None:
    """Megatron's flag that an unknown one is a misspelling of."""
    if option in table.of_option:
        return None
    return next(iter(difflib.get_close_matches(option, table.of_option, n=1, cutoff=MISTYPED)), None)


def unknown_problem(words: str, table: FlagTable) -> Problem:
    """The problem of a flag, or value, that Megatron does not have."""
    option = words.split()[0]
    close = mistyped(option, table)
    todo = f"did you mean {close}?" if close is not None else "drop it for planning, if it is your own script's"
    known = option in table.of_option
    needed = f"a {'value' if known else 'flag'} of Megatron {table.releases[0]} to {table.releases[-1]}"
    return Problem(option, f"unknown, {words.partition(' ')[2]}" if known else "unknown", needed, todo)


def _value(flag: Flag, option: str, words: Sequence[str], problems: list[Problem], unknown: list[str]) -> Any:
    """Convert the words after a flag to its type."""
    if flag.takes == 0:
        return flag.switched(option)
    needed = {"+": "one value or more", "*": "values", 1: "a value"}.get(flag.takes, f"{flag.takes} values")
    if (not words and flag.takes != "*") or (isinstance(flag.takes, int) and len(words) != flag.takes):
        problems.append(Problem(option, f"{len(words)} values" if words else "nothing", needed))
        return None
    read = [_typed(flag, option, word, problems, unknown) for word in words]
    return read[0] if flag.takes == 1 else read


def _typed(flag: Flag, option: str, word: str, problems: list[Problem], unknown: list[str]) -> Any:
    kinds = {"int": (int, "a whole number"), "float": (float, "a number")}
    todo = "let the shell fill its variables in" if SHELL.search(word) else ""
    if flag.type in kinds:
        convert, needed = kinds[flag.type]
        try:
            number = convert(word)
        except ValueError:
            problems.append(Problem(option, word or "nothing", needed, todo))
            return None
        return in_range(flag, option, number, problems)
    if flag.choices and word not in flag.choices:
        kind = flag.kind
        if kind is not None and kind.name == "no matter" and not todo:
            unknown.append(f"{option} {word}")
        elif flag.sets in OPEN:
            pass  # later code knows more values
        elif kind is None or kind.name != "refused":  # else it is refused with a reason, whatever its value
            problems.append(Problem(option, word, f"one of {', '.join(map(str, flag.choices))}", todo))
    return word


def in_range(flag: Flag, where: str, number: float, problems: list[Problem]) -> float | None:
    """The number; None, with a problem, if it cannot be a size."""
    if number < 1 and flag.sets in AT_LEAST_ONE:
        problems.append(Problem(where, str(number), "at least 1"))
        return None
    return number


@dataclass(frozen=True)
class Fact:
    """One value of the job."""

    place: str
    """Path in a job file: `model.layers`."""
    value: Any
    origin: str
    """The flag that gives it, or how it follows from others."""


def as_job_data(facts: Iterable[Fact]) -> dict[str, Any]:
    """The facts as nested dicts, like a job file."""
    data: dict[str, Any] = {}
    for fact in facts:
        *path, last = fact.place.split(".")
        inside = data
        for key in path:
            inside = inside.setdefault(key, {})
        inside[last] = fact.value
    return data
