"""Fingerprints of the functions of megatron-core and Transformer Engine that hooks rely on, by release; compares them with the
installed source.

releases.json: {"0.16": {"recorded_from": "0.16.1", "fingerprints": {FUNCTION: HASH}, "only_with": {"experts": {FUNCTION: HASH}}}}

The first release lists every function; each later one those that changed, were added, or are `gone`. If one differs, the plan is
refused (rule R6). `also` has fingerprints of other patch releases of the same minor one, and of frameworks that replace the
function, that were found to be equivalent. `scripts/record_release.py` writes the entry of a release.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from megatron_lynx.errors import HookRefused, Problem

GONE = "gone"

Fingerprints = Mapping[str, str]
"""First 16 hex digits of the SHA-256 of each function's source, by `module:qualified.name`."""


class Held(NamedTuple):
    """A function that a hook relies on."""

    hook: str
    site: str
    release: str
    problem: Problem | None
    """None: it reads as recorded."""

    @property
    def as_recorded(self) -> bool:
        return self.problem is None


@dataclass(frozen=True)
class Release:
    version: str
    fingerprints: Fingerprints
    only_with: Mapping[str, Fingerprints] = field(default_factory=dict)
    """Functions that matter only in some runs: with a kind of half, by its section's name (`experts`, `latent`, `sparse`,
    `gated_delta_net`, `mamba`), a `head` in pieces, `hybrid` models, `overlapped` exchanges of experts, layers of Transformer
    Engine (`te`: importable only if it is installed); of Transformer Engine itself `fp8`, `fp4` and `grouped` experts."""
    also: Fingerprints = field(default_factory=dict)

    def rows(self, what: str = "", hook: str = "") -> Iterator[Held]:
        """The functions that matter only with `what`, or in every run. `hook`: of all; by default found from each module."""
        for site, recorded in (self.only_with.get(what, {}) if what else self.fingerprints).items():
            known = tuple(filter(None, (recorded, self.also.get(site))))
            yield Held(hook or hook_of(site), site, self.version, _problem_of(site, known))

    def stale(self, what: str = "") -> list[Problem]:
        return [row.problem for row in self.rows(what, "any") if row.problem is not None]


def _problem_of(site: str, recorded: tuple[str, ...]) -> Problem | None:
    try:
        present = fingerprint(site)
    except (ImportError, AttributeError) as missing:
        return Problem(site, f"nothing ({missing})", "the function this package relies on", "see `megatron-lynx hooks`")
    if present in recorded:
        return None
    todo = "use a release as published, or have its table recorded anew"
    return Problem(site, f"source with fingerprint {present}", " or ".join(recorded), todo)


def releases_in(file: Path) -> dict[str, Release]:
    """The releases of a file, by version, oldest first."""
    known: dict[str, Release] = {}
    release = Release("", {})
    for version, entry in json.loads(file.read_text(encoding="utf-8")).items():
        tables = entry.get("only_with", {}).items()
        only_with = {name: changed(release.only_with.get(name, {}), table) for name, table in tables}
        also = {function: hashed for patch in entry.get("also", {}).values() for function, hashed in patch.items()}
        fingerprints = changed(release.fingerprints, entry.get("fingerprints", {}))
        known[version] = release = Release(version, fingerprints, {**release.only_with, **only_with}, also)
    return known


def changed(before: Fingerprints, changes: Fingerprints) -> dict[str, str]:
    return {function: recorded for function, recorded in {**before, **changes}.items() if recorded != GONE}


KNOWN = releases_in(Path(__file__).with_suffix(".json"))
KNOWN_TE = releases_in(Path(__file__).with_name("transformer_engine.json"))


def imported(module: str, name: str) -> Any:
    """The module. Raises `HookRefused` if it cannot be imported: it may lack triton, or libraries of a GPU."""
    try:
        return import_module(module)
    except (ImportError, OSError, RuntimeError) as missing:
        problem = Problem(module, str(missing), "it, to be imported", "install it")
        raise HookRefused(f"{name} cannot be imported", [problem]) from None


def installed_version() -> str:
    """The version of the imported megatron-core, e.g. `0.16.1`. Raises `HookRefused` if it cannot be imported."""
    return str(imported("megatron.core", "megatron-core").__version__)


def present_release() -> Release:
    """The release of the imported megatron-core. Raises `HookRefused` if it is unknown."""
    return table_of(installed_version(), KNOWN, "megatron.core", "megatron-core", "install one of these")


def installed_te() -> str:
    imported("transformer_engine.pytorch", "Transformer Engine")
    return str(imported("transformer_engine", "Transformer Engine").__version__)


def present_te() -> Release:
    todo = "install one of these, or launch with --transformer-impl local"
    return table_of(installed_te(), KNOWN_TE, "transformer_engine", "Transformer Engine", todo)


def table_of(version: str, known: Mapping[str, Release], package: str, name: str, todo: str) -> Release:
    """The release of an installed version. Raises `HookRefused` if unknown, with the differences from the nearest known one."""
    release = known.get(minor_of(version))
    if release is None:
        nearest = min(known.values(), key=lambda one: abs(number_of(one.version) - number_of(version)))
        todo = f"{todo}; what moved since {nearest.version} follows"
        unknown = Problem(package, version, f"one of {', '.join(f'{minor}.x' for minor in known)}", todo)
        raise HookRefused(f"this release of {name} is not known", [unknown, *nearest.stale()])
    return release


def minor_of(version: str) -> str:
    return ".".join(version.split(".")[:2])


def number_of(version: str) -> int:
    """A sort key: larger for a later minor release."""
    major, minor = minor_of(version).split(".")
    return 1000 * int(major) + int(minor)


def fingerprint(name: str) -> str:
    module, _, path = name.partition(":")
    return _hash_of_source(inspect.unwrap(attrgetter(path)(import_module(module))))


@cache
def _hash_of_source(function: Any) -> str:
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]


RELIES_ON: Mapping[str, Sequence[str]] = json.loads(Path(__file__).with_name("relies_on.json").read_text(encoding="utf-8"))
"""Modules of `megatron.core` by the hook (`apply/hooks/<name>`) or kind of section that relies on them."""


def held_here() -> list[Held]:
    """Rows of megatron-core, and of Transformer Engine if it is known. Raises `HookRefused` for an unknown megatron-core."""
    releases, missing = [present_release()], set[str]()
    try:
        releases.append(present_te())
    except HookRefused:  # the doctor reports it
        missing.add("te")
    if find_spec("triton") is None:  # Megatron's Mamba mixer imports it, and torch for CPUs does not install it
        missing.add("mamba")
    return [row for release in releases for what in ("", *release.only_with) if what not in missing for row in release.rows(what)]


def hook_of(site: str) -> str:
    """The hook that relies on a function; ValueError if none does."""
    if site.startswith("transformer_engine."):
        return "transformer_engine"
    module = site.partition(":")[0].removeprefix("megatron.core.")
    for hook, modules in RELIES_ON.items():
        if module in modules:
            return hook
    raise ValueError(f"no hook is known to rely on {site}")
