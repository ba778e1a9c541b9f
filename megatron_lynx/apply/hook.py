"""Replaces attributes, and restores them.

A claim names the attribute that is *looked up* at call time: a module's global, or an attribute of one instance. All claims of an
installation are verified before any attribute changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from megatron_lynx.errors import HookRefused, Problem

_ABSENT = object()
MARK = "__megatron_lynx__"


@dataclass(frozen=True, eq=False)
class Claim:
    owner: Any
    name: str
    replaced_by: Callable[[Any], Any]
    reason: str
    label: str = ""

    @property
    def where(self) -> str:
        owner = self.label or getattr(self.owner, "__name__", type(self.owner).__name__)
        return f"{owner}.{self.name}"

    def problem(self, *, around_others: bool = False) -> Problem | None:
        """Why this claim cannot be installed now. `around_others`: attributes outside of models may already have a hook of
        another model's installation."""
        attribute = getattr(self.owner, self.name, _ABSENT)
        if attribute is _ABSENT:
            return Problem(self.where, "nothing", f"a function, {self.reason}", "use a release of Megatron that has it")
        of_nobody = isinstance(self.owner, ModuleType | type)
        if getattr(attribute, MARK, False) and not (around_others and of_nobody):
            return Problem(
                self.where, "a plan that is installed already", "no second one", "remove the first installation before"
            )
        return None


@dataclass(eq=False)
class Hook:
    claim: Claim
    replacement: Any = field(init=False)
    _before: Any = field(init=False)

    def __post_init__(self) -> None:
        claim = self.claim
        self._before = vars(claim.owner).get(claim.name, _ABSENT)
        self.replacement = claim.replaced_by(getattr(claim.owner, claim.name))
        setattr(self.replacement, MARK, True)
        setattr(claim.owner, claim.name, self.replacement)

    @property
    def active(self) -> bool:
        return vars(self.claim.owner).get(self.claim.name) is self.replacement

    def restore(self) -> None:
        """Restore the original. The caller has checked `active`."""
        if self._before is _ABSENT:
            delattr(self.claim.owner, self.claim.name)
        else:
            setattr(self.claim.owner, self.claim.name, self._before)


def verify(claims: Sequence[Claim], *, around_others: bool = False) -> list[Problem]:
    """Every claim that cannot be installed, and every attribute claimed twice. `around_others`: see `Claim.problem`."""
    claim_problems = (claim.problem(around_others=around_others) for claim in claims)
    problems = [problem for problem in claim_problems if problem is not None]
    seen: dict[tuple[int, str], Claim] = {}
    for claim in claims:
        other = seen.setdefault((id(claim.owner), claim.name), claim)
        if other is not claim:
            problems.append(Problem(claim.where, f"two claims ({other.reason}; {claim.reason})", "one"))
    return problems


def put_in_place(claims: Sequence[Claim]) -> list[Hook]:
    hooks: list[Hook] = []
    try:
        for claim in claims:
            hooks.append(Hook(claim))
    except BaseException:
        for hook in reversed(hooks):
            hook.restore()
        raise
    return hooks


def give_back(hooks: Sequence[Hook]) -> None:
    """Restore in reverse order. Raises `HookRefused`, and restores none, if one of our hooks was replaced since."""
    foreign = [hook for hook in hooks if not hook.active]
    if foreign:
        raise HookRefused(
            "cannot remove the plan",
            [
                Problem(hook.claim.where, "another replacement on top of ours", "ours", "undo in the reverse order of installing")
                for hook in foreign
            ],
        )
    for hook in reversed(hooks):
        hook.restore()
