"""Replaces attributes and entries of libraries, and gives back the identical objects."""

from __future__ import annotations

from collections.abc import MutableMapping
from contextlib import ExitStack
from typing import Any

ABSENT = object()


def replace(undo: ExitStack, owner: Any, name: str, new: Any) -> None:
    entry = vars(owner).get(name, ABSENT)
    setattr(owner, name, new)
    if entry is ABSENT:
        undo.callback(delattr, owner, name)
    else:
        undo.callback(setattr, owner, name, entry)


def replace_entry(undo: ExitStack, mapping: MutableMapping[str, Any], key: str, new: Any) -> None:
    before = mapping.get(key, ABSENT)
    mapping[key] = new
    if before is ABSENT:
        undo.callback(mapping.pop, key)
    else:
        undo.callback(mapping.__setitem__, key, before)
