"""What a plan does, as the page shows it."""

from __future__ import annotations

from megatron_lynx.anatomy import DENSE
from megatron_lynx.plan.stage import WeightGradients
from megatron_lynx.report.treatments import stages_of
from tests.report.samples import PLAN


def test_weight_gradients_that_are_put_off_are_named_with_their_waits() -> None:
    entry, *others = PLAN.stages
    rules = [
        rule.model_copy(update={"weight_gradients": {"linear_fc2": ("bwd.attention.0", "pipe.recv_backward")}})
        for rule in entry.rules
    ]
    defers = entry.model_copy(update={"rules": tuple(rules), "weight_gradients": WeightGradients(bytes=4096)})
    first, second = stages_of(PLAN.model_copy(update={"stages": (defers, *others)}))
    assert (first["deferred_bytes"], second["deferred_bytes"]) == (4096, 0)
    for treatment in first["treatments"]:
        assert treatment["deferred"] == ["linear_fc2: bwd.attention.0, pipe.recv_backward"] * (treatment["half"] == "mlp")
    assert all(treatment["deferred"] == [] for treatment in second["treatments"])


def test_where_halves_are_replayed_by_phase() -> None:
    first = stages_of(PLAN)[0]
    assert [name for name, _ in first["treatments"][0]["items"]] == list(DENSE["attention"].names)
    assert [treatment["window"] for treatment in first["treatments"]] == [
        "bwd.mlp.0",
        "bwd.attention.0+1",
        "bwd.mlp.0",
        "fwd.mlp.0 / in cool-down pipe.recv_backward",
    ]
