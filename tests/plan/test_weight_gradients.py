"""Weight gradients that a plan defers: what it may say of them, and what is refused, with the place and what there is."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lynx.plan import Plan, dump_plan
from tests.plan.test_plan_file import KEPT, RECOMPUTED, small_plan

ALL = {"layers": "1-2", "keep": [*KEPT, *RECOMPUTED]}


def plan_of(
    waits: dict[str, list[str]] | None = None,
    *,
    pieces: dict[str, int] | None = None,
    at: int = 0,
    bound: int | None = 1 << 20,
    **facts: Any,
) -> dict[str, Any]:
    """Two stages of two layers; those of stage `at` defer."""
    data = small_plan() | {"parallel": {"tensor": 2, "pipeline": 2}} | facts
    for stage, layers in zip(data["stages"], ("1-2", "3-4"), strict=True):
        stage |= {"ahead_depth": 0, "rules": [ALL | {"layers": layers}]}
    stage = data["stages"][at]
    if pieces is not None:
        stage["rules"][0]["weight_gradient_pieces"] = pieces
    if waits is not None:
        stage["rules"][0]["weight_gradients"] = waits
    if bound is not None:
        stage["weight_gradients"] = {"bytes": bound}
    return data


@pytest.mark.parametrize(
    ("linear", "wait"),
    [
        ("linear_fc1", "bwd.mlp.0"),
        ("linear_fc2", "bwd.mlp.0"),
        ("linear_fc1", "fwd.attention.0"),
        ("linear_qkv", "pipe.recv_backward"),
    ],
)
def test_what_comes_behind_its_own_backward(linear: str, wait: str) -> None:
    Plan.model_validate(plan_of({linear: [wait]}))


def test_the_send_of_a_gradient() -> None:
    """Also of one micro-batch; without tensor-parallel collectives."""
    text = dump_plan(Plan.model_validate(plan_of({"linear_fc1": ["pipe.send_backward"]}, at=1, **ONE)))
    assert "linear_fc1: [pipe.send_backward]" in text
    Plan.model_validate(plan_of({"linear_qkv": ["pipe.send_backward"]}, at=1, parallel={"tensor": 1, "pipeline": 2}))


def test_pieces_have_a_wait_each() -> None:
    plan = Plan.model_validate(
        plan_of({"linear_fc1": ["bwd.mlp.0", "bwd.attention.0", "bwd.attention.0"]}, pieces={"linear_fc1": 3})
    )
    assert "weight_gradient_pieces: {linear_fc1: 3}\n" in (text := dump_plan(plan))
    assert "linear_fc1: [bwd.mlp.0, bwd.attention.0, bwd.attention.0]" in text
    assert Plan.model_validate(plan.model_dump()) == plan


def test_layers_below_come_later() -> None:
    """Of layer 2 only: layer 1 of this stage has none below."""
    data = plan_of({"linear_fc1": ["bwd.attention.0", "bwd.mlp.0-1"]})
    data["stages"][0]["rules"] = [ALL | {"layers": 1}, data["stages"][0]["rules"][0] | {"layers": 2}]
    text = dump_plan(Plan.model_validate(data))
    assert "weight_gradients:\n          linear_fc1: [bwd.attention.0, bwd.mlp.0-1]\n" in text
    assert "  weight_gradients: {bytes: 1048576}\n" in text


def test_plans_that_defer_nothing_do_not_mention_it() -> None:
    assert "weight_gradients" not in dump_plan(Plan.model_validate(plan_of(bound=None)))


ONE = {"batch": {"micro": 1, "microbatches": 1}}
SEQUENCE_PARALLEL = {"parallel": {"tensor": 2, "pipeline": 2, "sequence_parallel": True}}


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (plan_of({"linear_fc3": ["bwd.mlp.0"]}), "weight_gradients.linear_fc3 is no linear of a layer: there are linear_qkv, "),
        (plan_of({"linear_fc1": []}), "weight_gradients.linear_fc1 names no wait"),
        (plan_of({"linear_fc1": ["bwd.mlp.0", "bwd.mlp.0"]}), "weight_gradients.linear_fc1 names bwd.mlp.0 twice"),
        (plan_of({"linear_fc1": 3 * ["bwd.mlp.0"]}, pieces={"linear_fc1": 2}), "names bwd.mlp.0 3 times, but has 2 pieces"),
        (plan_of({"linear_fc1": ["bwd.mlp.0"]}, pieces={"linear_fc1": 2}), "is 2, but weight_gradients.linear_fc1 names 1 waits"),
        (plan_of({"linear_fc1": ["bwd.mlp.0"]}, pieces={"linear_fc2": 2}), "is 2, but weight_gradients.linear_fc2 names 0 waits"),
        (plan_of({"linear_fc1": ["bwd.mlp.0"]}, pieces={"linear_fc1": 1}), "greater than or equal to 2"),
        (plan_of({"linear_fc1": ["on_demand"]}), "no such name"),
        (plan_of({"linear_fc1": ["bwd.mlp.0"]}, bound=None), "rules defer weight gradients, so weight_gradients.bytes must say"),
        (plan_of(None), "weight_gradients.bytes is 1048576, but no rule defers weight gradients"),
        (plan_of({"linear_fc1": ["bwd.mlp.0"]}, bound=0), "greater than or equal to 1"),
        (plan_of({"linear_fc1": ["bwd.mlp.1"]}), "names bwd.mlp.1, which is no wait of this stage"),
        (plan_of({"linear_fc1": ["bwd.mlp.0-1"]}), "layers 1-2: weight_gradients.linear_fc1 names bwd.mlp.0-1, which is no wait"),
        (plan_of({"linear_fc1": ["fwd.mlp.0+2"]}), "names fwd.mlp.0\\+2, which is no wait of this stage"),
        (plan_of({"linear_fc1": ["pipe.recv_backward"]}, at=1), "but the last stage receives no gradient"),
        (plan_of({"linear_fc1": ["pipe.send_backward"]}), "names pipe.send_backward, but the first stage sends no gradient"),
        (plan_of({"linear_fc1": ["pipe.send_backward"]}, at=1, schedule="double_buffered"), "no wait follows the send of a"),
        (plan_of({"linear_fc1": ["pipe.recv_backward"]}, **ONE), "but with one micro-batch no gradient is received behind its"),
        (plan_of({"linear_fc1": ["fwd.mlp.0"]}, **ONE), "but no forward runs behind a backward .batch.microbatches 1."),
        (plan_of({"linear_qkv": ["bwd.mlp.0"]}, **ONE), "which comes before its own backward, and there is only one micro-batch"),
        (plan_of({"linear_fc2": ["bwd.mlp.0"]}, **ONE, **SEQUENCE_PARALLEL), "bwd.mlp.0, which comes before its own backward"),
        (plan_of({"linear_fc1": ["bwd.mlp.0"]}, parallel={"tensor": 1, "pipeline": 2}), "but tensor 1 has no collectives"),
    ],
)  # fmt: skip
def test_refusals(data: dict[str, Any], found: str) -> None:
    with pytest.raises(ValueError, match=found):
        Plan.model_validate(data)


@pytest.mark.parametrize("wait", ["bwd.mlp.1", "bwd.mlp.2"])
def test_with_sequence_parallelism_what_is_behind_the_gathered_gradient(wait: str) -> None:
    Plan.model_validate(plan_of({"linear_fc2": [wait]}, **ONE, **SEQUENCE_PARALLEL))


def with_experts(waits: dict[str, list[str]], **facts: Any) -> dict[str, Any]:
    """Four layers on two stages, those of the first with experts and shared ones; tokens travel between two ranks."""
    data = plan_of(waits, **({"parallel": {"tensor": 1, "pipeline": 2, "expert": 2}} | facts))
    data["model"] |= {"moe_layers": ["1-2"], "shared_experts": True}
    return data


@pytest.mark.parametrize(
    ("linear", "wait"),
    [
        ("linear_qkv", "bwd.mlp.0"),
        ("linear_proj", "fwd.mlp.2"),
        ("shared_fc1", "bwd.mlp.2"),
        ("shared_fc2", "fwd.mlp.0"),
        ("shared_fc2", "pipe.recv_backward"),
        ("experts_fc1", "bwd.mlp.1"),
        ("experts_fc2", "fwd.mlp.0"),
    ],
)
def test_exchanges_of_tokens_are_waits(linear: str, wait: str) -> None:
    Plan.model_validate(with_experts({linear: [wait]}))


WHOLE = {"parallel": {"tensor": 1, "pipeline": 2}}


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (with_experts({"linear_fc1": ["bwd.mlp.0"]}), "linear_fc1 is deferred, but the MLP of layer 1 is a mixture of experts"),
        (with_experts({"shared_fc1": ["bwd.mlp.0"]}) | {"model": small_plan()["model"]} | WHOLE, "layer 1 is no mixture of exp"),
        (with_experts({"linear_qkv": ["bwd.mlp.3"]}), "names bwd.mlp.3, which is no wait of this stage"),
        (with_experts({"linear_qkv": ["fwd.mlp.3"]}), "names fwd.mlp.3, which is no wait of this stage"),
        (with_experts({"linear_qkv": ["bwd.attention.0"]}), "names bwd.attention.0, but tensor 1 has no collectives"),
        (with_experts({"linear_qkv": ["fwd.attention.0"]}), "names fwd.attention.0, but tensor 1 has no collectives"),
        (with_experts({"linear_qkv": ["bwd.mlp.0"]}, **WHOLE), "lies in a mixture of experts whose tokens do not travel"),
        (with_experts({"linear_qkv": ["fwd.mlp.0"]}, **WHOLE), "lies in a mixture of experts whose tokens do not travel"),
        (with_experts({"shared_fc1": ["bwd.mlp.2"]}, **ONE), "bwd.mlp.2, which comes before its own backward, and there is only"),
        (with_experts({"experts_fc1": ["bwd.mlp.0"]}, **ONE), "bwd.mlp.0, which comes before its own backward, and there"),
        (with_experts({"linear_qkv": ["bwd.mlp.2"]}, **ONE), "bwd.mlp.2, which comes before its own backward, and there is only"),
    ],
)  # fmt: skip
def test_refusals_beside_experts(data: dict[str, Any], found: str) -> None:
    with pytest.raises(ValueError, match=found):
        Plan.model_validate(data)
