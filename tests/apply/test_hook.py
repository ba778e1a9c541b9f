"""Claims and hooks by themselves: verified before anything changes, put in place all or none, given back as they were found."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lynx.anatomy import MLP
from megatron_lynx.apply.hook import Claim, give_back, put_in_place, verify
from megatron_lynx.apply.hooks.halves import _check_call
from megatron_lynx.apply.hooks.steps import _apart
from megatron_lynx.apply.installation import Installation
from megatron_lynx.errors import HookRefused
from megatron_lynx.runtime.engine import Engine
from megatron_lynx.runtime.frame import HalfPolicy


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
    assert [problem.finding for problem in found] == ["two claims (a site; a half)"]
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


def test_an_error_between_two_passes_leaves_as_it_came_and_no_hook() -> None:
    """A micro-batch is in flight then, and removing a plan in the middle of a step is refused: that must not hide the error."""
    linear, engine = Linear(), Engine()
    installation = Installation(engine, put_in_place([Claim(linear, "forward", wrapped, "a site")]))
    output = torch.ones(1, requires_grad=True) * 1
    with engine.forward_pass(0, 0, 1) as ended_with:
        ended_with(output)
    assert engine.busy
    with pytest.raises(ValueError, match="a message was lost"), installation:
        raise ValueError("a message was lost")
    assert (linear.forward(), installation.hooks, engine.busy) == ("as it was", (), False)


@pytest.mark.parametrize("name", ["inference_context", "inference_params"])
def test_inference_is_no_call_that_can_be_recomputed(name: str) -> None:
    """Megatron's newer name, and the one that it still takes."""
    half = HalfPolicy(layer=3, section=MLP, recompute=frozenset(["activation"]))
    for value in (None, object()):
        with pytest.raises(HookRefused, match=name) if value else nullcontext():
            _check_call(half, {name: value})


def test_ucc_keeps_all_messages_in_its_own_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was chosen to avoid NCCL's messages, which other groups have."""
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: "ucc")
    calls: list[dict[str, Any]] = []

    def original(**kwargs: Any) -> dict[str, Any]:
        calls.append(kwargs)
        return {name: "work" for name in ("send_next", "recv_next") if kwargs[f"tensor_{name}"] is not None}

    group = SimpleNamespace(size=lambda: 3)
    tensors = {"tensor_send_prev": None, "tensor_recv_prev": None, "tensor_send_next": "output", "tensor_recv_next": "gradient"}
    assert _apart(original, **tensors, group=group) == {"send_next": "work", "recv_next": "work"}
    assert [call["group"] for call in calls] == [group, group]
