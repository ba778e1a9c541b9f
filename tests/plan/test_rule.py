"""Layers that are treated alike are written as one range, and still mean the same."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from megatron_lynx.plan import Plan
from megatron_lynx.plan.plan import LayerRange
from megatron_lynx.plan.rule import CheckpointGroups, joined
from tests.plan.strategies import plans


@settings(deadline=None, max_examples=12)
@given(plans(checkpoints=True))
@pytest.mark.slow
def test_joining_single_layers(plan: Plan) -> None:
    for stage in plan.stages:
        if any(isinstance(rule.checkpoint, CheckpointGroups) for rule in stage.rules):
            continue  # groups of layers are counted from a rule's first one: single layers are other groups
        single = [stage.rule_for(n).model_copy(update={"layers": LayerRange(first=n, last=n)}) for n in stage.layers]
        rules = joined(reversed(single))
        assert len(rules) <= len(stage.rules)
        again = stage.model_copy(update={"rules": rules})
        layers = [again.rule_for(n).model_copy(update={"layers": LayerRange(first=n, last=n)}) for n in stage.layers]
        assert layers == single
