"""What a plan does, as the page shows it."""

from __future__ import annotations

from megatron_lynx.anatomy import DENSE
from megatron_lynx.plan.plan import Offload, WeightGradients
from megatron_lynx.report.contents import stages_of
from megatron_lynx.testbed.tiny_jobs import tiny_job
from tests.report.samples import PLAN
from tests.transparency.checkpoints import checkpointed, with_rest_in_wait
from tests.transparency.plans import plan_for


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


def test_a_checkpoint_shows_what_runs_again_and_what_it_keeps() -> None:
    job = tiny_job("gpt", experts={"count": 4, "per_token": 2, "ffn": 32, "layers": "all"}, bias=False)
    attention, mlp = stages_of(checkpointed(plan_for(job, lambda layer: ()), "layer"))[0]["treatments"]
    assert (attention["window"], mlp["window"]) == (
        "checkpoint is layer: keeps the layer's input",
        "checkpoint is layer: keeps nothing: attention makes its input",
    )
    spread = tiny_job("llama", tensor=2, sequence_parallel=True)
    _, gone_on = stages_of(with_rest_in_wait(checkpointed(plan_for(spread, lambda layer: ()), "layer")))[0]["treatments"]
    assert gone_on["window"] == "checkpoint is layer, then bwd.mlp.0: keeps nothing: attention makes its input"
    assert dict(attention["items"])["linear_proj"] == "recompute", "its output is the MLP half's input"
    assert {item: said for item, said in mlp["items"] if item in ("router", "dispatch", "experts_fc1", "combine")} == {
        "router": "keep",
        "dispatch": "recompute",
        "experts_fc1": "recompute",
        "combine": "keep",
    }


def test_inputs_of_checkpoints_that_go_to_the_host_are_said() -> None:
    """Only how many bytes go was said. Megatron holds the chunk's own input; that of experts goes where theirs does."""
    job = tiny_job("gpt", layers=3, experts={"count": 4, "per_token": 2, "ffn": 32, "layers": "all"}, bias=False)
    plan = checkpointed(checkpointed(plan_for(job, lambda layer: ()), "layer", [2]), "halves", [1, 3])

    def windows(offload: Offload | None) -> list[str]:
        (stage,) = plan.stages
        shown = stages_of(plan.with_stages([stage.model_copy(update={"offload": offload})]))[0]["treatments"]
        return [each["window"].partition("keeps ")[2] for each in shown]

    layer = ["the layer's input", "nothing: attention makes its input"]
    on_host = "its input, to the host"
    assert windows(None) == ["its input", "its input", *layer, "its input", "its input"]
    sent = ["its input", "its input", f"{layer[0]}, to the host", layer[1], on_host, "its input"]
    assert windows(Offload(bytes=1 << 20)) == sent
    assert windows(Offload(bytes=1 << 20, experts=True)) == [sent[0], on_host, *sent[2:5], on_host]


def test_where_halves_are_recomputed_by_phase() -> None:
    first = stages_of(PLAN)[0]
    assert [name for name, _ in first["treatments"][0]["items"]] == list(DENSE["attention"].names)
    assert [treatment["window"] for treatment in first["treatments"]] == [
        "bwd.mlp.0",
        "bwd.attention.0+1",
        "bwd.mlp.0",
        "pipe.recv_backward",
    ]
