"""Layers with adapters around their linears equal stock in every bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from megatron_lynx.config.job import Budget
from megatron_lynx.plan import Plan
from megatron_lynx.planner import make_plan
from tests.long import long
from tests.profiler.made_up import made_up_profile
from tests.te_releases import pools_with
from tests.tiny_jobs import tiny_job
from tests.transparency.adapters import compare, refused
from tests.transparency.checkpoints import checkpointed
from tests.transparency.offloaded import offloading
from tests.transparency.trials import Trial
from tests.uniform import uniform_plan

ALL = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "PP2": {"pipeline": 2, "microbatches": 4},
    "PP2xVPP2": {"pipeline": 2, "microbatches": 4, "layers_per_chunk": 1},
    "TP2": {"tensor": 2},
    "TP2+SP": {"tensor": 2, "sequence_parallel": True},
}


@pytest.fixture(scope="module")
def pool_of() -> Iterator[Any]:
    yield from pools_with("2.17", core="0.19")


@pytest.mark.parametrize(
    ("layout", "targets", "fields", "te"),
    [
        ("one rank", ALL, {"dropout": 0.1}, False),
        ("PP2xVPP2", ("linear_qkv", "linear_fc2"), {"dropout": 0.1}, False),
        ("TP2", ALL, {}, False),
        ("TP2+SP", ("linear_proj", "linear_fc1"), {"dropout": 0.1}, True),
        *long(
            ("TP2", ALL, {}, True),
            ("one rank", ALL, {"dropout": 0.1}, True),
            ("PP2xVPP2", ("linear_qkv", "linear_fc2"), {"dropout": 0.1}, True),
            ("TP2+SP", ("linear_proj", "linear_fc1"), {"dropout": 0.1}, False),
            *(
                (*each, te)
                for each in (("PP2", ALL, {}), ("TP2+SP", ALL, {}), ("one rank", ("linear_qkv",), {}))
                for te in (False, True)
            ),
        ),
    ],
)
def test_every_bit(pool_of: Any, layout: str, targets: tuple[str, ...], fields: dict[str, Any], te: bool) -> None:
    """The first layer's input needs no gradient, as the embedding is frozen."""
    of_te = {"implementation": "transformer_engine", "dtype": "bf16"} if te else {}
    job = tiny_job("llama", **LAYOUTS[layout], **of_te, hidden_dropout=0.1, adapters={"rank": 4, "targets": targets, **fields})
    kept, everything = uniform_plan(job, "none"), uniform_plan(job)
    halves = checkpointed(checkpointed(kept, "halves", [2, 3]), "mlp", [1, 4])
    candidates = [kept, everything, halves, offloading(uniform_plan(job), 4_000)]
    for outcomes in pool_of(job.gpus).run(compare, job, candidates, Trial(canaries=True, steps=2)):
        assert [outcome.differing for outcome in outcomes] == [[]] * len(candidates)
        assert [outcome.planned.frames_left for outcome in outcomes] == [0] * len(candidates)
        assert all(outcome.planned.counts[-1].recomputed > 0 for outcome in outcomes[1:3])


def test_weight_gradients_are_not_delayed_and_collectives_are_no_windows() -> None:
    """Without adapters the same plans are valid."""
    for layout, changed, found in (
        (
            {"pipeline": 2},
            {"weight_gradients": {"linear_fc1": ["pipe.recv_backward"]}},
            "weight_gradients.linear_fc1 is deferred",
        ),
        ({"tensor": 2}, {"windows": {"mlp": "bwd.mlp.0"}}, "windows.mlp is bwd.mlp.0"),
        ({"tensor": 2}, {"recompute": "linear_fc1"}, "linear_fc1 is recomputed"),
    ):
        job = tiny_job("llama", **layout, adapters={"rank": 4})
        plan = uniform_plan(job, ("activation",))
        data = plan.model_dump(mode="json")
        rule = data["stages"][0]["rules"][0]
        if "recompute" in changed:
            rule["keep"].remove("linear_fc1")
            rule["recompute"].append("linear_fc1")
        else:
            rule |= changed
            data["stages"][0]["weight_gradients"] = {"bytes": 1_000} if "weight_gradients" in changed else None
        with pytest.raises(ValidationError) as caught:
            Plan.model_validate(data)
        assert found in str(caught.value)


def test_a_plan_for_other_weights_is_refused(pool_of: Any) -> None:
    job, whole = tiny_job("llama", adapters={"rank": 4, "targets": ("linear_qkv",)}), tiny_job("llama")
    [said] = pool_of(1).run(refused, job, uniform_plan(whole))
    assert "plan: model.adapted: found (), needed ('linear_qkv',), as this run has it" in said
    [said] = pool_of(1).run(refused, job, uniform_plan(job), "DoRALinear")
    assert "layer 1.linear_qkv: found megatron.bridge.peft.lora_layers.DoRALinear" in said


def test_a_plan_is_made_and_trained_under(pool_of: Any) -> None:
    """Within less memory than stock needs: it recomputes."""
    job = tiny_job("llama", pipeline=2, microbatches=4, hidden_dropout=0.1, adapters={"rank": 4, "dropout": 0.1})
    tight = job.model_copy(update={"budget": Budget(activation_mib=0.18)})
    plan = make_plan(tight, made_up_profile(tight))
    assert any(rule.recompute or rule.checkpoint for entry in plan.stages for rule in entry.rules)
    for [outcome] in pool_of(2).run(compare, job, [plan], Trial(canaries=True, steps=2)):
        assert outcome.differing == []
