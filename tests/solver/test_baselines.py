"""Baselines hold and expose what their names say."""

from __future__ import annotations

import pytest

from megatron_lynx.anatomy import ITEMS, ROW_PARALLEL
from megatron_lynx.cost.recompute import BALANCED
from megatron_lynx.solver.baselines import of_policy, on_demand, recompute_all
from tests.solver.problems import LAYOUTS, catalogued

every_layout = pytest.mark.parametrize("name", sorted(LAYOUTS))


@every_layout
def test_less_memory_is_bought_with_time(name):
    problem = catalogued(name).of(1)
    none, balanced, full = (of_policy(problem, policy) for policy in ("none", "balanced", "full"))
    assert none.exposed_s == 0 < balanced.exposed_s < full.exposed_s
    assert none.resident_bytes > balanced.resident_bytes > full.resident_bytes


@every_layout
def test_policies_recompute_what_they_name(name):
    problem = catalogued(name).of(0)
    recomputed = {policy: of_policy(problem, policy).layers[0] for policy in ("none", "selective", "balanced", "full")}
    items = {policy: {item for half in layer.halves for item in half.recompute} for policy, layer in recomputed.items()}
    assert items["none"] == set()
    assert "core_attention" in items["selective"] <= {"rotary", "core_attention"}
    assert items["balanced"] == set(BALANCED)
    assert items["balanced"] < items["full"] <= set(ITEMS) - set(ROW_PARALLEL)
    assert all(half.seat.placement.on_demand for layer in recomputed.values() for half in layer.halves)


@every_layout
def test_windows_make_a_full_recomputation_no_slower(name):
    recomputed = recompute_all(catalogued(name).of(0))
    assert recomputed.exposed_s <= on_demand(recomputed).exposed_s
    assert recomputed.resident_bytes == on_demand(recomputed).resident_bytes


def test_a_planned_policy_has_to_be_solved_for():
    with pytest.raises(KeyError):
        of_policy(catalogued("long windows").of(0), "planned")
