"""What this package knows of one minor release of megatron-core: which functions it relies on, and how they read.

A fingerprint is a hash of a function's unwrapped source text. If one differs, the code that a hook counts on has changed, and
installing is refused (rule R6): a comment is reason enough, because only reading the new text can tell.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from operator import attrgetter
from typing import Any

from megatron_lynx.errors import Problem


@dataclass(frozen=True)
class Release:
    """One row of knowledge: `version` is `major.minor`; `fingerprints` maps `module:function` to the hash of its text."""

    version: str
    fingerprints: Mapping[str, str]
    beside_engine: Mapping[str, str] = field(default_factory=dict)
    """The functions that matter with Transformer Engine's layers alone; without it they cannot be imported."""

    def stale_beside_engine(self) -> list[Problem]:
        """The same for layers of Transformer Engine."""
        if not self.beside_engine:
            return [
                Problem(
                    "layers",
                    f"Transformer Engine's, in {self.version}",
                    "a later release",
                    "launch with --transformer-impl local",
                )
            ]
        return [problem for name, recorded in self.beside_engine.items() if (problem := _problem(name, recorded)) is not None]

    def stale(self) -> list[Problem]:
        """Every function that does not read as recorded."""
        return [problem for name, recorded in self.fingerprints.items() if (problem := _problem(name, recorded)) is not None]


def _problem(name: str, recorded: str) -> Problem | None:
    try:
        found = fingerprint(name)
    except (ImportError, AttributeError) as missing:
        return Problem(name, f"nothing ({missing})", "the function this package relies on", "see `megatron-lynx hooks`")
    if found == recorded:
        return None
    return Problem(
        name, f"source with fingerprint {found}", recorded, "use a release as published, or have its table recorded anew"
    )


def fingerprint(name: str) -> str:
    """The first 16 hex digits of the SHA-256 of a function's source: `name` is `module:qualified.name`."""
    return hashlib.sha256(inspect.getsource(_unwrapped(name)).encode()).hexdigest()[:16]


def _unwrapped(name: str) -> Any:
    module, _, path = name.partition(":")
    return inspect.unwrap(attrgetter(path)(import_module(module)))
