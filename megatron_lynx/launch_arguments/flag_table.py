"""The flags of Megatron's parsers, by release, and their meaning for a plan.

--swiglu        takes nothing, sets swiglu to True       0.16 0.17 0.18 0.19
--split         takes one word                           0.16 0.17 0.18 0.19        a flag that changed has a row for each form

`scripts/record_flags.py` writes the rows. The columns `kind` and `why`, and `groups`, are written by hand; a flag whose cost is
unknown has neither.

read           becomes part of the job                        --num-layers
priced as      counted as something else, and reported so      --fp16: as bf16
no matter      changes neither activations nor seconds         --lr: learning rate
refused        by a row of `megatron_lynx.limits`              --spec
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatron_lynx.limits import ARGUMENTS, limits

REFUSED = {limit.argument: limit.reason for limit, _ in limits(["any"], ARGUMENTS)}
"""Names of Megatron's namespace that cannot be estimated, and why."""


class FlagKind(NamedTuple):
    """`why`: the reason of a refusal, the substitute in pricing, or the subject."""

    name: Literal["read", "priced as", "refused", "no matter"]
    why: str = ""


@dataclass(frozen=True)
class Flag:
    """One form of one flag."""

    options: tuple[str, ...]
    """Spellings. If `takes` is 0 and `to` is None, those that start with --no- switch it off."""
    sets: str
    """The name in Megatron's namespace."""
    takes: int | str
    """Number of words that follow, or `+` (some), `*` (any)."""
    type: str
    """int, float or text."""
    to: Any
    """The value set by a flag without words; None: True, or False for its --no- form."""
    choices: tuple[Any, ...]
    default: Any
    group: str
    """Megatron's heading."""
    releases: tuple[str, ...]
    kind: FlagKind | None
    """Unknown if None."""

    @property
    def is_read(self) -> bool:
        return self.kind is not None and self.kind.name == "read"

    def switched(self, option: str) -> Any:
        """The value that this spelling of a flag without words sets."""
        return not option.startswith("--no-") if self.to is None else self.to


@dataclass(frozen=True)
class FlagTable:
    """Every flag of every recorded release."""

    releases: tuple[str, ...]
    """Oldest first."""
    flags: tuple[Flag, ...]
    no_flag: frozenset[str]
    """Fields of Megatron's configuration that no argument sets, and that change neither activations nor seconds."""
    no_flag_of_bridge: frozenset[str]
    """Fields of `cfg.model` of Megatron-Bridge that are ignored, or read elsewhere."""

    def newest(self, option: str, releases: Iterable[str] | None = None) -> Flag | None:
        """The form of an option in the newest of these releases (by default all) that has it."""
        wanted = set(self.releases if releases is None else releases)
        forms = [flag for flag in self.of_option.get(option, ()) if wanted & set(flag.releases)]
        return max(forms, key=lambda flag: max(self.releases.index(one) for one in flag.releases if one in wanted), default=None)

    def releases_of(self, option: str) -> tuple[str, ...]:
        """The releases that have this option in any form, oldest first."""
        having = {release for flag in self.of_option.get(option, ()) for release in flag.releases}
        return tuple(release for release in self.releases if release in having)

    def default(self, name: str, release: str) -> Any:
        """The default of a name in the namespace; None if the release does not have it."""
        return next((flag.default for flag in self.of_name.get(name, ()) if release in flag.releases), None)

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
    return FlagTable(tuple(data["releases"]), flags, frozenset(data["no_flag"]), frozenset(data["no_flag_of_bridge"]))


def _flag(row: dict[str, Any], groups: dict[str, str]) -> Flag:
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
        kind=_kind(row, groups),
    )


def _kind(row: dict[str, Any], groups: dict[str, str]) -> FlagKind | None:
    """`groups`: Megatron's headings whose flags change neither activations nor seconds, with their subject."""
    if "kind" in row:
        return FlagKind(row["kind"], row.get("why", ""))
    if (why := REFUSED.get(row["sets"])) is not None:
        return FlagKind("refused", why)
    return FlagKind("no matter", groups[row["group"]]) if row["group"] in groups else None


def _grouped(pairs: Iterable[tuple[str, Flag]]) -> dict[str, list[Flag]]:
    grouped: dict[str, list[Flag]] = {}
    for name, flag in pairs:
        grouped.setdefault(name, []).append(flag)
    return grouped
