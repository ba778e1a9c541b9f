"""Checkpoints in plan files: how they are written, read, explained and refused; plans without them say what they always said."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from megatron_lynx.plan.explanation import explanation
from megatron_lynx.plan.plan import LayerRange, Plan, Rule
from megatron_lynx.plan.plan_file import dump_plan, load_plan
from megatron_lynx.plan.rule import CheckpointGroups, joined
from megatron_lynx.plan.timetables import timetable_of
from tests.tiny_jobs import tiny_job
from tests.transparency.checkpoints import ahead, checkpointed
from tests.transparency.plans import plan_for

NOTHING = plan_for(tiny_job("llama"), lambda layer: ())


def rule(checkpoint: Any, **given: Any) -> Rule:
    return Rule.model_validate({"layers": "1-4", "checkpoint": checkpoint, **given})


@pytest.mark.parametrize("checkpoint", ["layer", "halves", "attention", "mlp", {"layers": 3}], ids=str)
def test_it_is_written_and_read_as_what_it_is(tmp_path, checkpoint):
    plan = checkpointed(NOTHING, checkpoint)
    text = dump_plan(plan)
    (tmp_path / "plan.yaml").write_text(text)
    assert load_plan(tmp_path / "plan.yaml") == plan
    said = "{layers: 3}" if isinstance(checkpoint, dict) else checkpoint
    assert f"checkpoint: {said}\n" in text
    assert "checkpoint" not in dump_plan(NOTHING)


def test_a_key_that_says_nothing_changes_no_digest():
    assert NOTHING.digest == "5cb76a55b2c4a13e5a18f80aeaea5ec16eeb89842c2bd60fa4477948675de1eb"
    assert checkpointed(NOTHING, "layer").digest != NOTHING.digest


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"keep": ["linear_qkv"]}, "linear_qkv: listed, but checkpoint is layer: all of the attention half runs again"),
        (
            {"windows": {"mlp": "bwd.mlp.1"}},
            "windows.mlp is bwd.mlp.1, but checkpoint is layer: it runs again where backward enters it, at most to bwd.mlp.0",
        ),
        ({"gather": {"attention": "on_demand"}}, "gather.attention is given, but checkpoint is layer"),
        ({"checkpoint": "mlp"}, "linear_qkv is neither kept nor recomputed"),
        ({"checkpoint": {"layers": 1}}, "greater than or equal to 2"),
        ({"checkpoint": "layers"}, "'layer', 'halves', 'attention' or 'mlp'"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(given, problem):
    with pytest.raises(ValueError, match=problem.replace("{", r"\{")):
        rule(**{"checkpoint": "layer", **given})


def test_beside_userbuffers_too():
    plan = plan_for(tiny_job("llama", tensor=2, sequence_parallel=True, implementation="transformer_engine"), lambda layer: ())
    raw = checkpointed(plan, {"layers": 2}).model_dump(mode="json")
    raw["parallel"]["userbuffers"] = True
    assert all(rule.checkpoint for stage in Plan.model_validate(raw).stages for rule in stage.rules)


def test_only_whole_groups_can_have_rules_of_their_own():
    own = rule({"layers": 2}).model_copy(update={"layers": LayerRange(first=3, last=7)})
    assert [(part.first, part.last) for part in own.parts] == [(3, 4), (5, 6), (7, 7)]
    assert [part.first for part in rule("layer").parts] == [1, 2, 3, 4]


def test_groups_are_counted_from_the_first_layer_of_a_rule():
    """Two rules that say the same are one only where the first one's groups are full: else other layers would keep an input."""
    even, odd = (
        [rule({"layers": 2}).model_copy(update={"layers": LayerRange(first=a, last=b)}) for a, b in spans]
        for spans in (((1, 2), (3, 4)), ((1, 3), (4, 6)))
    )
    assert len(joined(even)) == 1
    assert joined(odd) == tuple(odd)
    assert [layer for layer in range(1, 4) if not odd[0].feeds(layer, "mlp")] == [2, 3]


def test_an_input_is_needed_where_the_last_half_of_its_group_begins():
    found = {half.key: half.ahead for half in timetable_of(checkpointed(NOTHING, {"layers": 2}), 0).chunks[0]}
    assert [found[layer, half] for layer in (1, 2) for half in ("attention", "mlp")] == [4, 3, 2, 1]


def test_an_input_is_needed_where_it_begins_to_travel():
    """Where backward enters the attention half of the layer above. The model's last layer has none above."""
    plan = ahead(checkpointed(plan_for(tiny_job("llama", tensor=2), lambda layer: ()), "layer"))
    found = [half.ahead for half in timetable_of(plan, 0).chunks[0] if half.half == "attention"]
    assert found == [3] * plan.model.layers


def test_it_is_explained():
    console = Console(width=160, file=StringIO())
    console.print(explanation(checkpointed(NOTHING, {"layers": 2})))
    text = console.file.getvalue()
    for words in (
        "checkpointed layers 1-4 ({layers: 2}): one input is kept",
        "the input of every 2 layers",
        "nothing: attention makes its input",
        "all, what communicates too",
    ):
        assert words in text


def test_the_timetable_says_what_runs_again_before_what():
    backward = timetable_of(checkpointed(NOTHING, "layer"), 0).backward(0)
    assert [task.half for task in backward.at("enter", (4, "mlp"))] == [(4, "attention"), (4, "mlp")]
    assert backward.at("enter", (4, "attention")) == ()
    assert isinstance(rule({"layers": 2}).checkpoint, CheckpointGroups)


REDUCED = checkpointed(plan_for(tiny_job("llama", tensor=2), lambda layer: ()), "layer")


def test_what_begins_ahead_is_written_read_and_explained(tmp_path):
    plan = ahead(REDUCED)
    text = dump_plan(plan)
    (tmp_path / "plan.yaml").write_text(text)
    assert load_plan(tmp_path / "plan.yaml") == plan
    assert "ahead: true\n" in text
    assert "ahead" not in dump_plan(REDUCED).replace("ahead_depth", "").replace("ahead_bytes", "").replace("ahead of", "")
    assert plan.checkpointed == "1-4 (layer, ahead)"
    console = Console(width=160, file=StringIO())
    console.print(explanation(plan))
    assert "begins ahead, at attention+1" in console.file.getvalue()


GATHERED = checkpointed(plan_for(tiny_job("llama", tensor=2, sequence_parallel=True), lambda layer: ()), "layer")


def test_a_gather_ahead_is_written_read_and_explained(tmp_path):
    plan = ahead(GATHERED, how="gather")
    (tmp_path / "plan.yaml").write_text(dump_plan(plan))
    assert load_plan(tmp_path / "plan.yaml") == plan
    assert "ahead: gather\n" in dump_plan(plan)
    assert plan.checkpointed == "1-4 (layer, ahead from its gather on)"
    console = Console(width=160, file=StringIO())
    console.print(explanation(plan))
    assert "its gather begins ahead, at attention+1" in console.file.getvalue()


@pytest.mark.parametrize("checkpoint", ["mlp", "halves"])
def test_the_input_of_a_half_by_itself_is_not_gathered_ahead(checkpoint):
    with pytest.raises(ValueError, match=f"ahead is gather, but checkpoint is {checkpoint}: it needs checkpoint layer"):
        rule(checkpoint, ahead="gather")


def test_where_nothing_is_gathered_nothing_is_gathered_ahead():
    with pytest.raises(
        ValueError, match=r"ahead is gather, but without parallel.sequence_parallel nothing is gathered: needed true"
    ):
        ahead(REDUCED, how="gather")
    job = tiny_job(
        "gpt",
        tensor=2,
        replicas=2,
        expert=2,
        sequence_parallel=True,
        experts={"count": 4, "per_token": 2, "ffn": 32},
        bias=False,
    )
    with pytest.raises(
        ValueError, match=r"ahead is gather, but no attention of these layers gathers .* without experts: needed true"
    ):
        ahead(checkpointed(plan_for(job, lambda layer: ()), "layer"), expert=2, how="gather")


@pytest.mark.parametrize("checkpoint", [None, "attention", {"layers": 2}], ids=str)
def test_only_a_layer_or_its_mlp_half_begins_ahead(checkpoint):
    with pytest.raises(ValueError, match=r"ahead is true, but .* needs checkpoint layer, halves or mlp"):
        rule(checkpoint, ahead=True)


@pytest.mark.parametrize(("layout", "checkpoint"), [({}, "layer"), ({"tensor": 2}, "mlp")], ids=str)
def test_where_nothing_is_waited_for_nothing_begins_ahead(layout, checkpoint):
    plan = checkpointed(plan_for(tiny_job("llama", **layout), lambda layer: ()), checkpoint)
    with pytest.raises(ValueError, match="ahead is true, but nothing that runs again there is waited for"):
        ahead(plan)


def test_hybridep_leaves_nothing_under_way():
    job = tiny_job(
        "gpt", replicas=2, expert=2, experts={"count": 4, "per_token": 2, "ffn": 32, "dispatcher": "hybridep"}, bias=False
    )
    with pytest.raises(ValueError, match="ahead is true, but nothing that runs again there is waited for"):
        ahead(checkpointed(plan_for(job, lambda layer: ()), "mlp"), expert=2)
