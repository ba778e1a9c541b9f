"""Replaces attributes, and restores them.

A claim names the attribute that is *looked up* at call time: a module's global, or an attribute of one instance. All claims of an
installation are verified before any attribute changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial, wraps
from types import ModuleType
from typing import Any

from megatron_lynx.errors import HookRefused, Problem

_ABSENT = object()
MARK = "__megatron_lynx__"


@dataclass(eq=False)
class Claim:
    """One attribute, and what makes its replacement from the original. In place, it is a hook."""

    owner: Any
    name: str
    replaced_by: Callable[[Any], Any]
    reason: str
    label: str = ""
    _before: Any = field(init=False, repr=False)
    _replacement: Any = field(init=False, repr=False)

    @property
    def where(self) -> str:
        owner = self.label or getattr(self.owner, "__name__", type(self.owner).__name__)
        return f"{owner}.{self.name}"

    def place(self) -> None:
        self._before = vars(self.owner).get(self.name, _ABSENT)
        self._replacement = self.replaced_by(getattr(self.owner, self.name))
        setattr(self._replacement, MARK, True)
        setattr(self.owner, self.name, self._replacement)

    @property
    def active(self) -> bool:
        return vars(self.owner).get(self.name) is self._replacement

    def restore(self) -> None:
        """Restore the original. The caller has checked `active`."""
        if self._before is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self._before)


def instead(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """A claim's `replaced_by`: a hook that calls `function` with the original, followed by the call's own arguments. It is no
    method: as a class's attribute it would not get the instance."""
    return lambda original: wraps(original)(partial(function, original))


def verify(claims: Sequence[Claim], *, around_others: bool = False) -> list[Problem]:
    """Every claim that cannot be installed now, and every attribute claimed twice. `around_others`: attributes outside of models
    may already have a hook of another model's installation."""
    problems, seen = list[Problem](), dict[tuple[int, str], Claim]()
    for claim in claims:
        attribute, of_nobody = getattr(claim.owner, claim.name, _ABSENT), isinstance(claim.owner, ModuleType | type)
        if attribute is _ABSENT:
            needed, todo = f"a function, {claim.reason}", "use a release of Megatron that has it"
            problems.append(Problem(claim.where, "nothing", needed, todo))
        elif getattr(attribute, MARK, False) and not (around_others and of_nobody):
            installed, todo = "a plan that is installed already", "remove the first installation before"
            problems.append(Problem(claim.where, installed, "no second one", todo))
        other = seen.setdefault((id(claim.owner), claim.name), claim)
        if other is not claim:
            problems.append(Problem(claim.where, f"two claims ({other.reason}; {claim.reason})", "one"))
    return problems


def put_in_place(claims: Sequence[Claim]) -> Sequence[Claim]:
    """Replace all, or none if one fails. Returns the claims, which are hooks now."""
    with ExitStack() as undo:
        for claim in claims:
            claim.place()
            undo.callback(claim.restore)
        undo.pop_all()
    return claims


def give_back(hooks: Sequence[Claim]) -> None:
    """Restore in reverse order. Raises `HookRefused`, and restores none, if one of our hooks was replaced since."""
    foreign = [hook for hook in hooks if not hook.active]
    if foreign:
        raise HookRefused(
            "cannot remove the plan",
            [
                Problem(hook.where, "another replacement on top of ours", "ours", "undo in the reverse order of installing")
                for hook in foreign
            ],
        )
    for hook in reversed(hooks):
        hook.restore()
