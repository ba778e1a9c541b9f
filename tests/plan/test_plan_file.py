"""Plans as files: exact both ways, refused with every problem, never half written."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings

from megatron_lynx.anatomy.address import RECV_BACKWARD
from megatron_lynx.config.loader import load_job
from megatron_lynx.errors import ConfigError
from megatron_lynx.plan import Plan, dump_plan, load_plan, plan_schema, save_plan
from megatron_lynx.plan.plan import Whole
from megatron_lynx.plan.rule import Windows
from megatron_lynx.validation import validated
from megatron_lynx.version import __version__
from megatron_lynx.yaml_file import write_yaml
from tests.plan.strategies import plans
from tests.uniform import uniform_plan

RECOMPUTED = [
    "input_layernorm",
    "linear_qkv",
    "rotary",
    "attention_bda",
    "pre_mlp_layernorm",
    "linear_fc1",
    "activation",
    "mlp_bda",
]
KEPT = ["core_attention", "linear_proj", "linear_fc2"]


def small_plan() -> dict[str, Any]:
    """Two stages of two layers, as a person would write it."""
    return {
        "version": 1,
        "model": {"layers": 4, "hidden": 64, "ffn": 256, "heads": 8, "kv_groups": 8, "seq": 32},
        "parallel": {"tensor": 2, "pipeline": 2},
        "batch": {"micro": 1, "microbatches": 4},
        "stages": [
            {"stage": 0, "layers": "1-2", "ahead_depth": 0, "rules": [{"layers": "1-2", "keep": KEPT, "recompute": RECOMPUTED}]},
            {"stage": 1, "layers": "3-4", "ahead_depth": 0, "rules": [{"layers": "3-4", "keep": KEPT, "recompute": RECOMPUTED}]},
        ],
        "provenance": {"made_by": "a person"},
    }


def problems_of(tmp_path: Path, text: str) -> list[str]:
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_plan(tmp_path / "plan.yaml")
    return [str(problem).replace(f"{tmp_path}/", "") for problem in caught.value.problems]


@settings(max_examples=25, deadline=None)
@given(plans(defers=True, pieces=True, checkpoints=True))
@pytest.mark.slow
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, plan: Plan) -> None:
    path = tmp_path_factory.mktemp("plans") / "plan.yaml"
    save_plan(plan, path)
    assert load_plan(path) == plan
    assert dump_plan(load_plan(path)) == path.read_text() == dump_plan(plan)


@settings(max_examples=10, deadline=None)
@given(plans(defers=True, pieces=True, checkpoints=True))
@pytest.mark.slow
def test_other_readers_see_the_same(plan: Plan) -> None:
    """PyYAML itself, which knows octal, yes and no, reads our files alike."""
    assert Plan.model_validate(yaml.safe_load(dump_plan(plan))) == plan


def test_a_dumped_plan_is_short_and_explained(tmp_path: Path) -> None:
    data = small_plan() | {"parallel": {"tensor": 2, "pipeline": 1}}
    data["stages"] = [
        {"stage": 0, "layers": "1-4", "ahead_depth": 1, "rules": [{"layers": "1-4", "keep": KEPT, "recompute": RECOMPUTED}]}
    ]
    data["stages"][0]["rules"][0]["windows"] = {"attention": "bwd.mlp.0"}
    text = dump_plan(Plan.model_validate(data))
    comment = [line for line in text.splitlines() if line.startswith("#")]
    assert 6 <= len(comment) <= 12
    assert __version__ in comment[0]
    assert "\n".join(text.splitlines()[len(comment) :]) == (
        "version: 1\n"
        "model: {layers: 4, hidden: 64, ffn: 256, heads: 8, kv_groups: 8, seq: 32}\n"
        "parallel: {tensor: 2, pipeline: 1}\n"
        "batch: {micro: 1, microbatches: 4}\n"
        "stages:\n"
        "  - stage: 0\n"
        "    layers: 1-4\n"
        "    ahead_depth: 1\n"
        "    rules:\n"
        "      - layers: 1-4\n"
        "        keep: [core_attention, linear_proj, linear_fc2]\n"
        f"        recompute: [{', '.join(RECOMPUTED)}]\n"
        "        windows: {attention: bwd.mlp.0}\n"
        "provenance:\n"
        "  made_by: a person"
    )


def test_every_problem_is_listed_with_its_place(tmp_path: Path) -> None:
    """A misspelt name hides neither the missing stage nor the layer that does not exist."""
    data = small_plan()
    del data["stages"][0]
    data["stages"][0]["rules"][0]["recompute"] = ["linear_qvk" if item == "linear_qkv" else item for item in RECOMPUTED]
    data["stages"][0]["ahead_dept"] = data["stages"][0].pop("ahead_depth")
    data["colour"] = "blue"
    found = problems_of(tmp_path, write_yaml(data))
    assert any(line.startswith("plan.yaml: stages.0.rules.0.recompute.1: found 'linear_qvk'") for line in found)
    assert any(line.endswith("did you mean linear_qkv?") for line in found)
    assert any(line.startswith("plan.yaml: stages.0.ahead_dept: found an unknown key") for line in found)
    assert any(line.startswith("plan.yaml: colour: found an unknown key") for line in found)
    assert "plan.yaml: stages are numbered (stage, chunk) [(1, 0)], but pipeline 2 with 1 chunks needs [(0, 0), (1, 0)]" in found
    assert any("the stages own layers 3-4, but the model has layers 1-4" in line for line in found)


@pytest.mark.parametrize(
    ("place", "value", "answer"),
    [
        (("stages", 0, "rules", 0, "layers"), "1-7", "plan.yaml: stages.0: a rule names layers 1-7, but the stage owns 1-2"),
        (("stages", 0, "rules", 0, "layers"), "2-1", "plan.yaml: stages.0.rules.0.layers: 2-1 ends before it begins"),
        (("stages", 0, "rules", 0, "layers"), "1-0", "plan.yaml: stages.0.rules.0.layers: 1-0 ends before it begins"),
        (("stages", 0, "rules", 0, "layers"), "none", "plan.yaml: stages.0: a rule is for no layers"),
        (("stages", 0, "layers"), "none", "plan.yaml: stages.0: a rule names layers 1-2, but there are none"),
        (("stages", 0, "rules", 0, "layers"), 0, "plan.yaml: stages.0.rules.0.layers: found 0, needed at least 1"),
        (("stages", 0, "rules", 0, "layers"), "1-99999999999", "needed at most 1000"),
        (
            ("stages", 0, "rules", 0, "recompute"),
            [*RECOMPUTED, "linear_fc2"],
            "plan.yaml: stages.0.rules.0: linear_fc2 is listed twice",
        ),
        (
            ("stages", 0, "rules", 0, "recompute"),
            [*RECOMPUTED, "linear_fc2"],
            "plan.yaml: stages.0.rules.0: linear_fc2 must be kept",
        ),
        (("stages", 0, "rules", 0, "windows"), {"mlp": "bwd.mpl.0"}, "windows.mlp: found 'bwd.mpl.0', needed one of on_demand"),
        (("stages", 0, "rules", 0, "windows"), {"mlp": "bwd.mpl.0"}, "did you mean bwd.mlp.0?"),
        (("stages", 0, "rules", 0, "windows"), {"mlp": {"now": "on_demand"}}, "windows.mlp: found a mapping, needed"),
        (
            ("stages", 0, "rules", 0, "gather"),
            {"mlp": "pipe.recv_backward"},
            "gather.mlp: found 'pipe.recv_backward', needed one of on_demand, bwd.",
        ),
        (("parallel", "sequence_parallel"), "yes", "plan.yaml: parallel.sequence_parallel: found 'yes', needed true or false"),
        (("parallel", "tensor"), "2", "plan.yaml: parallel.tensor: found '2', needed a whole number"),
        (("provenance", "job"), 0.1, "plan.yaml: provenance.job: found 0.1, needed text; put it in quotes"),
        (("stages", 0, "predicted"), {"step_s": float("1e400")}, "plan.yaml: stages.0.predicted.step_s"),
        (("stages",), {}, "plan.yaml: stages: found an empty mapping, needed a list"),
        (("version",), 2, "plan.yaml: version: found 2, needed 1; upgrade megatron-lynx"),
        (("version",), "1", "plan.yaml: version: found '1', needed 1"),
    ],
)
def test_refusals(tmp_path: Path, place: tuple[str | int, ...], value: Any, answer: str) -> None:
    data: Any = small_plan()
    part = data
    for key in place[:-1]:
        part = part.setdefault(key, {}) if isinstance(part, dict) else part[key]
    part[place[-1]] = value
    found = problems_of(tmp_path, write_yaml(data))
    assert any(answer in line for line in found), found


def test_the_schema_file_is_current() -> None:
    """Else run scripts/export_schema.py."""
    path = Path(__file__).parents[2] / "configs" / "plan.schema.json"
    assert json.loads(path.read_text()) == plan_schema()


def test_an_interrupted_write_leaves_the_old_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.yaml"
    plan = Plan.model_validate(small_plan())
    save_plan(plan, path)
    before = path.read_text()

    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_plan(plan.model_copy(update={"batch": plan.batch.model_copy(update={"micro": 2})}), path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_one_entry_for_each_chunk_in_layer_order() -> None:
    content = small_plan()
    content["parallel"]["chunks"] = 2
    rule = {"keep": [*KEPT, *RECOMPUTED]}
    places = [(0, 0), (1, 0), (0, 1), (1, 1)]
    content["stages"] = [
        {"stage": stage, "chunk": chunk, "layers": layer, "ahead_depth": 0, "rules": [{"layers": layer, **rule}]}
        for layer, (stage, chunk) in enumerate(places, start=1)
    ]
    assert [(stage.stage, stage.chunk) for stage in Plan.model_validate(content).stages] == places
    content["stages"][1]["chunk"] = 1
    with pytest.raises(ValueError, match=r"pipeline 2 with 2 chunks needs \[\(0, 0\), \(1, 0\), \(0, 1\), \(1, 1\)\]"):
        Plan.model_validate(content)


def test_whole_micro_batches_are_the_first_of_each_group() -> None:
    whole = Whole(of_every=3, first=2)
    assert [micro_batch in whole for micro_batch in range(6)] == [True, True, False, True, True, False]
    with pytest.raises(ValueError, match="the first 4 of every 3 micro-batches are more than there are"):
        Whole(of_every=3, first=4)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"batch": {"micro": 1, "microbatches": 1}}, "batch.microbatches is 1: it needs at least pipeline (2)"),
        ({"parallel": {"tensor": 2, "pipeline": 1}}, "pipeline is 1: it needs at least 2 stages"),
        ({"parallel": {"tensor": 2, "pipeline": 2, "chunks": 2}}, "parallel.chunks is 2, needed 1 with"),
        ({"model": {**small_plan()["model"], "moe_layers": ["1-2"]}}, "model.moe_layers is 1-2, needed none with"),
        ({"schedule": "flush", "defer_updates": False}, "schedule flush has nothing to defer"),
    ],
)
def test_two_versions_have_their_limits(tmp_path: Path, changes: dict[str, Any], found: str) -> None:
    plan = {**small_plan(), "schedule": "double_buffered", **changes}
    assert any(found in problem for problem in problems_of(tmp_path, write_yaml(plan)))


def test_no_micro_batch_is_whole_where_steps_overlap(tmp_path: Path) -> None:
    plan = {**small_plan(), "schedule": "double_buffered"}
    plan["stages"][1]["whole"] = {"of_every": 2, "first": 1}
    [found] = problems_of(tmp_path, write_yaml(plan))
    assert "stages.1.whole is given, needed none with schedule double_buffered" in found


def test_nothing_leaves_within_a_micro_batch_where_steps_overlap(tmp_path: Path) -> None:
    plan = {**small_plan(), "schedule": "double_buffered"}
    plan["stages"][1]["offload"] = {"bytes": 100, "pace_bytes": 10}
    [found] = problems_of(tmp_path, write_yaml(plan))
    assert "stages.1.offload.pace_bytes is given, needed none" in found


def test_a_pace_is_written_and_read(tmp_path: Path) -> None:
    raw = small_plan()
    raw["stages"][1]["offload"] = {"bytes": 100, "pace_bytes": 10, "half_by_half": "all"}
    plan = Plan.model_validate(raw)
    save_plan(plan, tmp_path / "plan.yaml")
    assert load_plan(tmp_path / "plan.yaml") == plan
    del raw["stages"][1]["offload"]["pace_bytes"]
    [found] = problems_of(tmp_path, write_yaml(raw))
    assert "half_by_half is all, so pace_bytes must say how many bytes are copied beside one half's forward" in found


def test_a_plan_that_recomputes_in_forwards_says_who_reads_it(tmp_path: Path) -> None:
    plan = small_plan()
    rule = plan["stages"][0]["rules"][0]
    rule["windows"] = {"mlp": "fwd.mlp.0"}
    rule["gather"] = {"attention": {"steady": "fwd.mlp.0", "cooldown": "on_demand"}}
    windows, gather = problems_of(tmp_path, write_yaml(plan))
    todo = "which megatron-lynx 0.2.0 was the last to read: make the plan again with `megatron-lynx plan`"
    assert f"windows.mlp: fwd.mlp.0 recomputes in a forward, {todo}" in windows
    assert f"gather.attention: fwd.mlp.0 recomputes in a forward, {todo}" in gather


def test_of_places_by_phase_the_steady_one_is_read() -> None:
    by_phase = {"attention": {"steady": "bwd.mlp.0", "cooldown": RECV_BACKWARD}, "mlp": {"cooldown": RECV_BACKWARD}}
    assert Windows.model_validate(by_phase) == Windows(attention="bwd.mlp.0", mlp="on_demand")


def test_a_plan_that_flushes_does_not_say_so(tmp_path: Path) -> None:
    """Plans from before there was a choice read, and are written, as they were."""
    plan = Plan.model_validate(small_plan())
    assert plan.schedule == "flush"
    assert "schedule" not in dump_plan(plan)
    without = Plan.model_validate({**small_plan(), "schedule": "double_buffered"})
    save_plan(without, tmp_path / "plan.yaml")
    assert "\nschedule: double_buffered\n" in (tmp_path / "plan.yaml").read_text()
    assert load_plan(tmp_path / "plan.yaml") == without


def test_keys_of_older_plans_are_read() -> None:
    """Version 0.1 wrote `replay`. Both spellings at once are refused, whichever list is empty."""
    plan = uniform_plan(load_job("demo"))
    data = yaml.safe_load(dump_plan(plan))
    older = {
        "hidden_recompute_s": "hidden_replay_s",
        "exposed_recompute_s": "exposed_replay_s",
        "recomputed_flops": "replayed_flops",
    }
    for stage in data["stages"]:
        stage["predicted"] |= {"hidden_recompute_s": 1.0, "exposed_recompute_s": 2.0}
        stage["predicted"] = {older.get(key, key): value for key, value in stage["predicted"].items()}
        for rule in stage["rules"]:
            rule["replay"] = rule.pop("recompute")
    read = validated(Plan, data, "plan.yaml")
    assert [stage.rules for stage in read.stages] == [stage.rules for stage in plan.stages]
    for now, made in zip(read.stages, plan.stages, strict=True):
        predicted = now.predicted
        flops = made.predicted.recomputed_flops
        assert flops > 0
        assert (predicted.hidden_recompute_s, predicted.exposed_recompute_s, predicted.recomputed_flops) == (1.0, 2.0, flops)
    text = read.model_dump_json(exclude_defaults=True).replace('"recompute":', '"replay":')
    for key, name in older.items():
        text = text.replace(f'"{key}":', f'"{name}":')
    assert read.digest == hashlib.sha256(text.encode()).hexdigest(), "outcomes of 0.1 name their plan by it"
    data["stages"][0]["rules"][0]["recompute"] = []
    with pytest.raises(ConfigError) as refusal:
        validated(Plan, data, "plan.yaml")
    assert "stages.0.rules.0.replay" in str(refusal.value)
