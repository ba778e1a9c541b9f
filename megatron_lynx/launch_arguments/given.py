"""Reads what a launch says, as arguments or as a file in Megatron's YAML form, into values by Megatron's names.

--num-layers 32 --swiglu --lr 3e-4  ─┐
                                     ├─> {num_layers: 32, swiglu: True, lr: 0.0003}, and the releases that take all of it
language_model: {num_layers: 32 ...} ─┘
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lynx.errors import Problem
from megatron_lynx.launch_arguments.flag_table import Flag, FlagTable

OURS = "--lynx-"
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


@dataclass(frozen=True)
class Value:
    """One value that was given."""

    flag: Flag
    said: str
    """The flag as it was written, or the key in a file."""
    value: Any


@dataclass(frozen=True)
class Given:
    """All values that were given. Of a flag that is given twice the last one counts, as in Megatron."""

    values: Mapping[str, Value]
    releases: tuple[str, ...]
    """The releases that take every flag of the launch, oldest first; never empty."""
    table: FlagTable

    @property
    def release(self) -> str:
        """The newest of them: its defaults are taken."""
        return self.releases[-1]

    def __getitem__(self, name: str) -> Any:
        """What Megatron would find under a name; its default where what was said could not be read."""
        said = self.values.get(name)
        return self.table.default(name, self.release) if said is None or said.value is None else said.value

    def origin(self, *names: str) -> str:
        """Where that comes from, in words: the first of these names that was said."""
        return next((self.values[name].said for name in names if name in self.values), "Megatron's default")


def given_arguments(arguments: Sequence[str], table: FlagTable) -> tuple[Given, list[Problem]]:
    """Read arguments, and everything about them that cannot be read."""
    options = [word.partition("=")[0] for word in arguments if _is_flag(word)]
    options = [option for option in options if table.newest(option) is not None]
    releases, problems = _common(options, table)
    values: dict[str, Value] = {}
    for option, words in _split(arguments, table, releases, problems):
        flag = table.newest(option, releases)
        if flag is None:
            problems.append(_unknown(option, table))
        else:
            values[flag.sets] = Value(flag, option, _value(flag, option, words, problems))
    return Given(values, releases, table), problems


def _is_flag(word: str) -> bool:
    return word.startswith("--") and len(word) > 2


def _common(options: Sequence[str], table: FlagTable) -> tuple[tuple[str, ...], list[Problem]]:
    """The releases that have all of these options; if none has, what contradicts what, and the newest release."""
    narrow: dict[tuple[str, ...], str] = {}
    for option in options:
        narrow.setdefault(table.releases_of(option), option)
    common = tuple(release for release in table.releases if all(release in releases for releases in narrow))
    if common:
        return common, []
    text = ", ".join(f"{option} ({' '.join(of)})" for of, option in narrow.items() if len(of) < len(table.releases))
    problem = Problem("launch", f"flags that no one release of Megatron takes together: {text}", "flags of one release")
    return table.releases[-1:], [problem]


def _split(
    arguments: Sequence[str], table: FlagTable, releases: Sequence[str], problems: list[Problem]
) -> Iterator[tuple[str, list[str]]]:
    """Each option with the words that belong to it. Words that belong to no option are problems."""
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        option, equals, value = word.partition("=")
        following = _up_to_next_flag(rest)
        if not _is_flag(word):
            problems.append(_stray(word))
        elif option.startswith(OURS):
            del rest[: 0 if equals else min(1, len(following))]
        else:
            flag = table.newest(option, releases) or table.newest(option)
            takes = len(following) if flag is None or not isinstance(flag.takes, int) else flag.takes
            if equals:
                yield option, [value]
            else:
                yield option, following[:takes]
                del rest[: len(following[:takes])]


def _up_to_next_flag(words: Sequence[str]) -> list[str]:
    return list(words[: next((index for index, word in enumerate(words) if _is_flag(word)), len(words))])


def _stray(word: str) -> Problem:
    todo = "let the shell fill its variables in" if SHELL.search(word) else ""
    return Problem("launch", f"the word {word!r}", "a flag, or a value behind one", todo)


def _unknown(option: str, table: FlagTable) -> Problem:
    close = difflib.get_close_matches(option, table.of_option, n=1)
    todo = f"did you mean {close[0]}?" if close else "drop it for planning, if it is your own script's"
    return Problem(option, "unknown", f"a flag of Megatron {table.releases[0]} to {table.releases[-1]}", todo)


def _value(flag: Flag, option: str, words: Sequence[str], problems: list[Problem]) -> Any:
    """What the words behind a flag mean, as its type has it."""
    if flag.takes == 0:
        return flag.switched(option)
    needed = {"+": "one value or more", "*": "values", 1: "a value"}.get(flag.takes, f"{flag.takes} values")
    if (not words and flag.takes != "*") or (isinstance(flag.takes, int) and len(words) != flag.takes):
        problems.append(Problem(option, f"{len(words)} values" if words else "nothing", needed))
        return None
    read = [_typed(flag, option, word, problems) for word in words]
    return read[0] if flag.takes == 1 else read


def _typed(flag: Flag, option: str, word: str, problems: list[Problem]) -> Any:
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
        problems.append(Problem(option, word, f"one of {', '.join(map(str, flag.choices))}", todo))
    return word


def in_range(flag: Flag, where: str, number: float, problems: list[Problem]) -> float | None:
    """The number, or None and a problem where it can be no size."""
    if number < 1 and flag.sets in AT_LEAST_ONE:
        problems.append(Problem(where, str(number), "at least 1"))
        return None
    return number
