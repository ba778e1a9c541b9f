"""The flags of Megatron's parsers, by release, and the values of a launch.

`scripts/record_flags.py` writes the rows of flags.json: one for each form of a flag. The columns `kind` and `why`, and `groups`,
are written by hand; a flag whose cost is unknown has neither."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatron_lynx.errors import Problem
from megatron_lynx.limits import ARGUMENTS, limits

REFUSED = {limit.argument: limit.reason for limit, _ in limits(["any"], ARGUMENTS)}


class FlagKind(NamedTuple):
    """`why`: the reason of a refusal, the substitute in pricing, or the subject."""

    name: Literal["read", "priced as", "refused", "no matter"]
    why: str = ""


@dataclass(frozen=True)
class Flag:
    options: tuple[str, ...]
    """Spellings. If `takes` is 0 and `to` is None, those that start with --no- switch it off."""
    sets: str
    takes: int | str
    type: str
    to: Any
    """The value set by a flag without words; None: True, or False for its --no- form."""
    choices: tuple[Any, ...]
    default: Any
    group: str
    releases: tuple[str, ...]
    kind: FlagKind | None

    @property
    def is_read(self) -> bool:
        return self.kind is not None and self.kind.name == "read"

    def switched(self, option: str) -> Any:
        return not option.startswith("--no-") if self.to is None else self.to


@dataclass(frozen=True)
class FlagTable:
    releases: tuple[str, ...]
    """Oldest first."""
    coming: tuple[str, ...]
    """Those that are recorded from Megatron's main branch: their defaults count only for flags that no other has."""
    flags: tuple[Flag, ...]
    no_flag: frozenset[str]
    """Fields of Megatron's configuration that no argument sets, and that change neither activations nor seconds."""
    no_flag_of_bridge: frozenset[str]
    """Fields of `cfg.model` of Megatron-Bridge that are ignored, or read elsewhere."""
    at_least_one: frozenset[str]
    conflicts: Mapping[str, Mapping[str, str]]

    def newest(self, option: str, releases: Iterable[str] | None = None) -> Flag | None:
        wanted = set(self.releases if releases is None else releases)
        forms = [flag for flag in self.of_option.get(option, ()) if wanted & set(flag.releases)]
        return max(forms, key=lambda flag: max(self.releases.index(one) for one in flag.releases if one in wanted), default=None)

    def releases_of(self, option: str) -> tuple[str, ...]:
        having = {release for flag in self.of_option.get(option, ()) for release in flag.releases}
        return tuple(release for release in self.releases if release in having)

    def default(self, name: str, release: str) -> Any:
        return next((flag.default for flag in self.of_name.get(name, ()) if release in flag.releases), None)

    def mistyped(self, option: str) -> str | None:
        """Return the flag that an unknown one is like."""
        if option in self.of_option:
            return None
        return next(iter(difflib.get_close_matches(option, self.of_option, n=1, cutoff=MISTYPED)), None)

    def unknown(self, words: str) -> Problem:
        option = words.split()[0]
        close = self.mistyped(option)
        todo = f"did you mean {close}?" if close is not None else "drop it for planning, if it is your own script's"
        known = option in self.of_option
        needed = f"a {'value' if known else 'flag'} of Megatron {self.releases[0]} to {self.releases[-1]}"
        return Problem(option, f"unknown, {words.partition(' ')[2]}" if known else "unknown", needed, todo)

    @cached_property
    def of_option(self) -> dict[str, list[Flag]]:
        return _grouped((option, flag) for flag in self.flags for option in flag.options)

    @cached_property
    def of_name(self) -> dict[str, list[Flag]]:
        return _grouped((flag.sets, flag) for flag in self.flags)


@cache
def flag_table() -> FlagTable:
    data = json.loads((Path(__file__).parent / "flags.json").read_text(encoding="utf-8"))
    flags = tuple(_flag(row, data["groups"]) for row in data["flags"])
    sets = {name: frozenset(data[name]) for name in ("no_flag", "no_flag_of_bridge", "at_least_one")}
    return FlagTable(tuple(data["releases"]), tuple(data["coming"]), flags, **sets, conflicts=data["conflicts"])


def _flag(row: dict[str, Any], groups: dict[str, str]) -> Flag:
    kind = None
    if "kind" in row:
        kind = FlagKind(row["kind"], row.get("why", ""))
    elif row["sets"] in REFUSED:
        kind = FlagKind("refused", REFUSED[row["sets"]])
    elif row["group"] in groups:
        kind = FlagKind("no matter", groups[row["group"]])
    columns = {"type": "text", "to": None, "choices": (), **row, "kind": kind}
    columns |= {name: tuple(columns[name]) for name in ("options", "choices", "releases")}
    return Flag(**{name: value for name, value in columns.items() if name != "why"})


def _grouped(pairs: Iterable[tuple[str, Flag]]) -> dict[str, list[Flag]]:
    grouped: dict[str, list[Flag]] = {}
    for name, flag in pairs:
        grouped.setdefault(name, []).append(flag)
    return grouped


OURS = "--lynx-"
BY_STEPS = "--step-batch-size-schedule"
"""One word with blanks; scripts often lose its quotes."""
PAIR = re.compile(r"[\d.]+[A-Za-z]?:\d+")


class Piece(NamedTuple):
    option: str | None
    """As written, without a value; None for a stray word."""
    flag: Flag | None
    values: tuple[str, ...]
    words: tuple[str, ...]


def pieces(arguments: Sequence[str], table: FlagTable, releases: Sequence[str]) -> Iterator[Piece]:
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not is_flag(word):
            yield Piece(None, None, (), (word,))
            continue
        option, equals, value = word.partition("=")
        flag = table.newest(option, releases)
        known = flag or table.newest(option)
        count = 0 if equals else next((index for index, one in enumerate(rest) if is_flag(one)), len(rest))
        if option.startswith(OURS):
            count = min(1, count)
        elif known is not None and isinstance(known.takes, int):
            count = min(known.takes, count)
        taken = tuple(rest[:count])
        del rest[:count]
        if option == BY_STEPS:
            while rest and PAIR.fullmatch(rest[0]):
                taken = (" ".join((*taken, rest.pop(0))),)
        yield Piece(option, flag, (value,) if equals else taken, (word, *taken))


def is_flag(word: str) -> bool:
    return word.startswith("--") and len(word) > 2


MISTYPED = 0.9
SHELL = re.compile(r"\$[A-Za-z_{(@*1-9]")
OPEN = frozenset({"optimizer"})


@dataclass(frozen=True)
class Value:
    flag: Flag
    said: str
    value: Any


@dataclass(frozen=True)
class Given:
    """All given values. The last of several counts, as in Megatron."""

    values: Mapping[str, Value]
    releases: tuple[str, ...]
    """The releases that accept every flag of the launch, oldest first; never empty."""
    table: FlagTable
    unknown: tuple[str, ...] = ()
    """Flags that Megatron does not have, with their words, and unknown values of flags that do not matter."""
    packed: str = ""

    @property
    def release(self) -> str:
        return next((one for one in reversed(self.releases) if one not in self.table.coming), self.releases[-1])

    def __getitem__(self, name: str) -> Any:
        """Megatron's value under a name; its default if the given one could not be read."""
        said = self.values.get(name)
        return self.table.default(name, self.release) if said is None or said.value is None else said.value

    def with_values(self, values: Mapping[str, Any], said: str) -> Given:
        added = {name: Value(self.table.of_name[name][-1], said, value) for name, value in values.items()}
        return replace(self, values={**self.values, **added})

    def is_on(self, name: str) -> bool:
        value = self[name]
        return value not in (None, False, 0, "none") and value != self.table.default(name, self.release)

    def unknown_value(self, option: str) -> str | None:
        """The words after a flag that Megatron does not have; None if it is not given."""
        return next((words.removeprefix(option).strip() for words in self.unknown if words.split()[0] == option), None)

    def conflicts(self) -> Iterator[Problem]:
        for name, other in self.table.conflicts["with"].items():
            if self.is_on(name) and self.is_on(other):
                yield Problem(self.origin(name), f"also {self.origin(other)}", "one of them: Megatron refuses both")
        for name, other in self.table.conflicts["without"].items():
            if self.is_on(name) and not self.is_on(other):
                setting = "given" if self[name] is True else str(self[name])
                yield Problem(self.origin(name), setting, f"--{other.replace('_', '-')} beside it", "Megatron stops here")

    def with_flags(
        self, arguments: Sequence[str], setting: Mapping[str, Sequence[str]], without: Collection[str]
    ) -> tuple[str, ...]:
        """Return a launch's arguments with these flags set, and without those of these names."""
        left = dict(setting)
        words: list[str] = []
        for piece in pieces(arguments, self.table, self.releases):
            if piece.flag is not None and piece.flag.sets in without:
                continue
            if piece.option not in setting:
                words += piece.words
            elif piece.option in left:
                words += [piece.option, *left.pop(piece.option)]
        return (*words, *(word for option, values in left.items() for word in (option, *values)))

    def origin(self, *names: str) -> str:
        """The first of these names that was given, as written."""
        return next((self.values[name].said for name in names if name in self.values), "Megatron's default")


def given_arguments(arguments: Sequence[str], table: FlagTable) -> tuple[Given, list[Problem]]:
    options = [word.partition("=")[0] for word in arguments if is_flag(word)]
    options = [option for option in options if table.newest(option) is not None]
    releases, problems = _common(options, table)
    values: dict[str, Value] = {}
    unknown: list[str] = []
    for piece in pieces(arguments, table, releases):
        if piece.option is None:
            todo = "let the shell fill its variables in" if SHELL.search(piece.words[0]) else ""
            problems.append(Problem("launch", f"the word {piece.words[0]!r}", "a flag, or a value behind one", todo))
        elif (flag := piece.flag) is not None:
            values[flag.sets] = Value(flag, piece.option, _value(flag, piece.option, piece.values, problems, unknown))
        elif not piece.option.startswith(OURS):
            unknown.append(" ".join(piece.words))
    return Given(values, releases, table, tuple(unknown)), problems


def _common(options: Sequence[str], table: FlagTable) -> tuple[tuple[str, ...], list[Problem]]:
    narrow: dict[tuple[str, ...], str] = {}
    for option in options:
        narrow.setdefault(table.releases_of(option), option)
    common = tuple(release for release in table.releases if all(release in releases for releases in narrow))
    if common:
        return common, []
    text = ", ".join(f"{option} ({' '.join(of)})" for of, option in narrow.items() if len(of) < len(table.releases))
    problem = Problem("launch", f"flags that no one release of Megatron takes together: {text}", "flags of one release")
    return table.releases[-1:], [problem]


def _value(flag: Flag, option: str, words: Sequence[str], problems: list[Problem], unknown: list[str]) -> Any:
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
    if number < 1 and flag.sets in flag_table().at_least_one:
        problems.append(Problem(where, str(number), "at least 1"))
        return None
    return number


@dataclass(frozen=True)
class Fact:
    place: str
    """Path in a job file: `model.layers`."""
    value: Any
    origin: str


def facts_in(given: Given, names: Mapping[str, str], *, on: bool = False) -> Iterator[Fact]:
    """Yield the values of names, by their place in a job. `on`: only those that are true, or not 0."""
    return (Fact(place, given[name], given.origin(name)) for place, name in names.items() if given[name] or not on)


def as_job_data(facts: Iterable[Fact]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for fact in facts:
        *path, last = fact.place.split(".")
        inside = data
        for key in path:
            inside = inside.setdefault(key, {})
        inside[last] = fact.value
    return data
