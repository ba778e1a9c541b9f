"""The flags that Megatron's own parsers take, release by release. Recorded by `scripts/record_flags.py`: facts, no text.

--swiglu        takes nothing, sets swiglu to True       0.16 0.17 0.18 0.19
--split         takes one word                           0.16 0.17 0.18 0.19        a flag that changed has a row for each form
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Flag:
    """One form of one flag."""

    options: tuple[str, ...]
    """Its spellings. Where `takes` is 0 and `to` is None, spellings that start with --no- switch it off."""
    sets: str
    """The name in Megatron's namespace."""
    takes: int | str
    """How many words follow: a number, or `+` (some), `*` (any)."""
    type: str
    """int, float or text."""
    to: Any
    """The value it sets if it takes no words; None: True, or False for its --no- form."""
    choices: tuple[Any, ...]
    default: Any
    group: str
    """Megatron's own heading for it."""
    releases: tuple[str, ...]

    def switched(self, option: str) -> Any:
        """What a flag that takes nothing sets, in this spelling."""
        return not option.startswith("--no-") if self.to is None else self.to


@dataclass(frozen=True)
class FlagTable:
    """Every flag of every recorded release."""

    releases: tuple[str, ...]
    """Oldest first."""
    flags: tuple[Flag, ...]

    def newest(self, option: str, releases: Iterable[str] | None = None) -> Flag | None:
        """The form of an option in the newest of these releases (None: of all) that has it."""
        wanted = set(self.releases if releases is None else releases)
        forms = [flag for flag in self.of_option.get(option, ()) if wanted & set(flag.releases)]
        return max(forms, key=lambda flag: max(self.releases.index(one) for one in flag.releases if one in wanted), default=None)

    def releases_of(self, option: str) -> tuple[str, ...]:
        """The releases that have this option in any form, oldest first."""
        having = {release for flag in self.of_option.get(option, ()) for release in flag.releases}
        return tuple(release for release in self.releases if release in having)

    def default(self, name: str, release: str) -> Any:
        """What a name of the namespace holds if no flag sets it; None where the release does not know it."""
        return next((flag.default for flag in self.of_name.get(name, ()) if release in flag.releases), None)

    @cached_property
    def of_option(self) -> dict[str, list[Flag]]:
        return _grouped((option, flag) for flag in self.flags for option in flag.options)

    @cached_property
    def of_name(self) -> dict[str, list[Flag]]:
        return _grouped((flag.sets, flag) for flag in self.flags)


@cache
def flag_table() -> FlagTable:
    """The recorded table."""
    data = json.loads((Path(__file__).parent / "flags.json").read_text(encoding="utf-8"))
    return FlagTable(tuple(data["releases"]), tuple(_flag(row) for row in data["flags"]))


def _flag(row: dict[str, Any]) -> Flag:
    return Flag(
        options=tuple(row["options"]),
        sets=row["sets"],
        takes=row["takes"],
        type=row.get("type", "text"),
        to=row.get("to"),
        choices=tuple(row.get("choices", ())),
        default=row["default"],
        group=row["group"],
        releases=tuple(row["releases"]),
    )


def _grouped(pairs: Iterable[tuple[str, Flag]]) -> dict[str, list[Flag]]:
    grouped: dict[str, list[Flag]] = {}
    for name, flag in pairs:
        grouped.setdefault(name, []).append(flag)
    return grouped
