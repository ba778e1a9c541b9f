"""What this package knows of one minor release of megatron-core: the functions it relies on, and the fingerprint of each.

A fingerprint is a hash of a function's unwrapped source text. If one differs, the code that a hook counts on has changed, and
installing is refused (rule R6). A changed comment is reason enough, because only somebody who reads the new text can tell.

    CORE_0_17 = CORE_0_16.then("0.17", fingerprints={...})      what reads otherwise in 0.17, came, or is GONE
    CORE_0_19 = CORE_0_19.reading_also({...})                   a patch release has another text, in nothing that matters
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from operator import attrgetter
from types import MappingProxyType
from typing import Any, TypeVar

from megatron_lynx.errors import HookRefused, Problem

GONE = "gone"
"""Stands in the place of a fingerprint where a release has lost a function that the release before it had."""

Table = TypeVar("Table", bound="Release")


@dataclass(frozen=True)
class Release:
    """The functions that matter in one release. A table maps `module:qualified.name` to the fingerprint of that function."""

    version: str
    """Major and minor number, as in `0.16`."""
    fingerprints: Mapping[str, str]
    """The functions that matter in every run."""
    only_with: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """The functions that matter only in runs that have something, by what that is: `experts`, `latent` attention, a `head` in
    pieces, exchanges of experts that are `overlapped`, or layers of Transformer Engine (`te`: they can be imported only where it
    is installed); of Transformer Engine itself `fp8`, `fp4`, and `grouped` experts."""
    also: Mapping[str, str] = field(default_factory=dict)
    """How functions read in another patch release of the same minor one, where that is known to be as good."""

    def reading_also(self: Table, also: Mapping[str, str]) -> Table:
        """The same release, with what functions of another of its patch releases read."""
        return replace(self, also=also)

    def then(
        self: Table, version: str, fingerprints: Mapping[str, str] = MappingProxyType({}), **only_with: Mapping[str, str]
    ) -> Table:
        """The next release, which is like this one but for what is said here.

        Args:
            version: its major and minor number.
            fingerprints: the functions that read otherwise than in this one, those that came, and those that are `GONE`.
            only_with: the same of those that matter only in some runs, by what these have.
        """
        tables = {name: _changed(self.only_with.get(name, {}), changed) for name, changed in only_with.items()}
        return replace(
            self,
            version=version,
            also={},
            fingerprints=_changed(self.fingerprints, fingerprints),
            only_with={**self.only_with, **tables},
        )

    def stale(self) -> list[Problem]:
        """Every function that matters in every run and does not read as recorded."""
        return differing(self.fingerprints, self.also)

    def stale_with(self, what: str) -> list[Problem]:
        """The same of those that matter only in runs that have this."""
        return differing(self.only_with.get(what, {}), self.also)


def table_of(version: str, known: Mapping[str, Table], package: str, name: str, todo: str) -> Table:
    """What is known of an installed version, such as `0.16.1`.

    Raises `HookRefused` where nothing is, with every function that moved since the nearest release that is known.
    """
    release = known.get(minor_of(version))
    if release is None:
        nearest = min(known.values(), key=lambda one: abs(number_of(one.version) - number_of(version)))
        todo = f"{todo}; what moved since {nearest.version} follows"
        unknown = Problem(package, version, f"one of {', '.join(f'{minor}.x' for minor in known)}", todo)
        raise HookRefused(f"this release of {name} is not known", [unknown, *nearest.stale()])
    return release


def minor_of(version: str) -> str:
    """`0.16` of `0.16.1`."""
    return ".".join(version.split(".")[:2])


def number_of(version: str) -> int:
    """A number that is larger for a later minor release."""
    major, minor = minor_of(version).split(".")
    return 1000 * int(major) + int(minor)


def _changed(before: Mapping[str, str], changed: Mapping[str, str]) -> dict[str, str]:
    return {function: recorded for function, recorded in {**before, **changed}.items() if recorded != GONE}


def differing(recorded: Mapping[str, str], also: Mapping[str, str] = MappingProxyType({})) -> list[Problem]:
    """Every function that does not read as recorded. `also`: as `Release` has it."""
    return [problem for name, hashed in recorded.items() if (problem := _problem(name, hashed, also.get(name))) is not None]


def _problem(name: str, recorded: str, also: str | None) -> Problem | None:
    try:
        found = fingerprint(name)
    except (ImportError, AttributeError) as missing:
        return Problem(name, f"nothing ({missing})", "the function this package relies on", "see `megatron-lynx hooks`")
    if found in (recorded, also):
        return None
    todo = "use a release as published, or have its table recorded anew"
    return Problem(name, f"source with fingerprint {found}", " or ".join(filter(None, (recorded, also))), todo)


def fingerprint(name: str) -> str:
    """The first 16 hex digits of the SHA-256 of a function's source: `name` is `module:qualified.name`."""
    return _hash_of_source(_unwrapped(name))


@cache
def _hash_of_source(function: Any) -> str:
    """Remembered for each function: to find where one ends Python reads its source word by word, and every plan asks for 30."""
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]


def _unwrapped(name: str) -> Any:
    module, _, path = name.partition(":")
    return inspect.unwrap(attrgetter(path)(import_module(module)))
