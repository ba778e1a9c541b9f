"""A launch's arguments as pieces: a flag and the words that belong to it.

--num-layers 32    --swiglu    --recompute-modules moe layernorm    --use-mpi    --rollout 3 4       stray
└─── takes 1 ──┘   └ none ┘    └──────────── one or more ─────────┘ └─── unknown to Megatron ──┘     └ no flag's ┘

To an unknown flag belong all words up to the next one that begins with `--`: nobody here knows how many it takes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_lynx.launch_arguments.flag_table import FlagTable

OURS = "--lynx-"


@dataclass(frozen=True)
class Piece:
    """One flag with its values, or one word that belongs to none."""

    option: str | None
    """As it was written, without a value; None for a stray word."""
    values: tuple[str, ...]
    words: tuple[str, ...]
    """All of it, as it was written."""

    @property
    def ours(self) -> bool:
        """Whether it is a flag of our launcher's."""
        return self.option is not None and self.option.startswith(OURS)


def pieces(arguments: Sequence[str], table: FlagTable, releases: Sequence[str]) -> Iterator[Piece]:
    """In order. `releases`: the newest of them that knows a flag says how many words it takes."""
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
    """The arguments without the flags that set these names of Megatron's namespace, and with others, by their spelling, in place
    of what they said before. New ones come last."""
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
