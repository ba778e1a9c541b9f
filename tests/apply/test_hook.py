"""Claims and hooks by themselves: verified before anything changes, put in place all or none, given back as they were found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_lynx.apply.hook import Claim, give_back, put_in_place, verify
from megatron_lynx.errors import HookRefused


class Linear:
    """Its instances have no `forward` of their own."""

    def forward(self) -> str:
        return "as it was"


def wrapped(original: Any) -> Any:
    return lambda: f"ours, around {original()}"


def failing(original: Any) -> Any:
    raise RuntimeError("a hook that cannot be made")


def test_what_was_no_attribute_of_the_owner_is_none_again() -> None:
    linear, module = Linear(), SimpleNamespace(reduce=lambda: "reduced")
    reduce = module.reduce
    hooks = put_in_place([Claim(linear, "forward", wrapped, "a site"), Claim(module, "reduce", wrapped, "a window")])
    assert (linear.forward(), module.reduce()) == ("ours, around as it was", "ours, around reduced")
    give_back(hooks)
    assert vars(linear) == {}
    assert module.reduce is reduce


def test_all_hooks_are_put_in_place_or_none() -> None:
    linear = Linear()
    with pytest.raises(RuntimeError, match="cannot be made"):
        put_in_place([Claim(linear, "forward", wrapped, "a site"), Claim(Linear(), "forward", failing, "another")])
    assert vars(linear) == {}


def test_an_attribute_that_two_claims_want() -> None:
    """The second one would wrap the first, and removal would depend on their order."""
    linear = Linear()
    found = verify([Claim(linear, "forward", wrapped, "a site"), Claim(linear, "forward", wrapped, "a half")])
    assert [problem.found for problem in found] == ["two claims (a site; a half)"]
    assert verify([Claim(linear, "forward", wrapped, "a site"), Claim(Linear(), "forward", wrapped, "another's")]) == []


def test_hooks_are_given_back_only_where_nobody_has_replaced_them() -> None:
    one, other = Linear(), Linear()
    hooks = put_in_place([Claim(one, "forward", wrapped, "a site"), Claim(other, "forward", wrapped, "a site")])
    ours, other.forward = other.forward, lambda: "somebody else's"  # type: ignore[method-assign]
    with pytest.raises(HookRefused, match="another replacement on top of ours"):
        give_back(hooks)
    assert one.forward() == "ours, around as it was", "untouched"
    other.forward = ours  # type: ignore[method-assign]
    give_back(hooks)
    assert vars(one) == vars(other) == {}
