"""Named policies hold and expose what their names say."""

from __future__ import annotations

import pytest

from megatron_lynx.anatomy import ITEMS, ROW_PARALLEL
from megatron_lynx.cost.recompute import BALANCED
from tests.solver.problems import LAYOUTS, catalogued, solve

every_layout = pytest.mark.parametrize("name", sorted(LAYOUTS))


@every_layout
def test_less_memory_is_bought_with_time(name):
    problem = catalogued(name).of(1)
    none, balanced, full = (solve(problem.under(policy)) for policy in ("none", "balanced", "full"))
    assert none.exposed_s == 0 < balanced.exposed_s < full.exposed_s
    assert none.resident_bytes > balanced.resident_bytes > full.resident_bytes


@every_layout
def test_policies_recompute_what_they_name(name):
    problem = catalogued(name).of(0)
    recomputed = {policy: solve(problem.under(policy)).layers[0] for policy in ("none", "selective", "balanced", "full")}
    items = {policy: {item for half in layer for item in half.recompute} for policy, layer in recomputed.items()}
    assert items["none"] == set()
    assert "core_attention" in items["selective"] <= {"rotary", "core_attention"}
    assert items["balanced"] == set(BALANCED)
    assert items["balanced"] < items["full"] <= set(ITEMS) - set(ROW_PARALLEL)
    assert not any(half.window for layer in recomputed.values() for half in layer)


def test_a_planned_policy_has_to_be_solved_for():
    with pytest.raises(KeyError):
        catalogued("long windows").of(0).under("planned")
