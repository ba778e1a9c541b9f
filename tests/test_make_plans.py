"""The plans that come with the package are what their jobs lead to today, and can be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron_lynx.anatomy import ATTENTION
from megatron_lynx.plan import load_plan
from megatron_lynx.plan.explanation import explanation
from scripts.make_plans import CONFIGS, differences, jobs, plan_of

pytestmark = pytest.mark.slow

JOBS = {path: (job, note) for path, job, note in jobs()}
SEEN_TO = {
    f"{model}-{cluster}"
    for model in ("gpt-22b", "gpt-175b", "llama-7b", "llama-65b", "llama2-70b", "llama3-8b", "llama3-70b")
    for cluster in ("a100-80g", "h800-80g")
} | {"llama3-8b-h100-80g", "llama3-70b-h100-80g"}


LONG_TO_PLAN = ("deepseek-v3", "llama3-405b-128k", "llama3-70b-256k")
"""Models whose plan alone takes as long as those of three others."""


LOOK_FIRST = """The planner makes another plan than the stored one. Look at what has changed, below: is the step shorter, or are
the bytes more exact, and is that what your change was for? A longer step is a fault of the planner until it is explained.
`python -m scripts.make_plans --look` prints this of all plans. If it is right, `python -m scripts.make_plans` stores them."""


def in_turns() -> list[Any]:
    """Each model on one of its clusters after the other in `make test`, and on all of them in `make long`."""
    models: dict[str, list[Path]] = {}
    for path in JOBS:
        models.setdefault(str(path.relative_to(CONFIGS / "plans")).rsplit("-", 2)[0], []).append(path)
    now = {paths[turn % len(paths)] for turn, (model, paths) in enumerate(models.items()) if model not in LONG_TO_PLAN}
    marks = {path: [] if path in now else [pytest.mark.long] for path in JOBS}
    return [pytest.param(path, marks=marks[path], id=str(path.relative_to(CONFIGS / "plans").with_suffix(""))) for path in JOBS]


def test_every_plan_has_a_job_and_the_catalogue_is_covered() -> None:
    assert set((CONFIGS / "plans").rglob("*.yaml")) == set(JOBS)
    assert {path.stem for path in JOBS} >= SEEN_TO


@pytest.mark.parametrize("path", in_turns())
def test_a_plan_is_current_and_explained(path: Path) -> None:
    job, note = JOBS[path]
    kept = load_plan(path)
    changed = differences(kept, plan_of(job, note))
    assert not changed, "\n".join([LOOK_FIRST, *changed])
    console = Console(width=150)
    with console.capture() as shown:
        console.print(explanation(kept))
    assert f"--pipeline-model-parallel-size {job.parallel.pipeline}" in shown.get()
    assert note[:60] in shown.get()


def test_what_has_changed_in_a_plan_is_named_before_it_is_stored() -> None:
    """A story: five faults of the planner were seen by stored plans alone, whose message asked for the fault to be stored."""
    stored = load_plan(CONFIGS / "plans" / "llama-7b-a100-80g.yaml")
    [stage] = stored.stages
    figures = stage.predicted
    slower = figures.model_copy(update={"step_s": 1.09 * figures.step_s, "memory_bytes": figures.memory_bytes + 2**30})
    [first, *rules] = stage.rules
    moved = first.model_copy(update={"layers": rules[0].layers})
    other = stage.model_copy(update={"predicted": slower, "rules": (moved, *rules)})
    profile = stored.provenance.model_copy(update={"profile": "another"})
    assert differences(stored, stored.model_copy(update={"provenance": profile})) == []
    seconds, size, *diff = differences(stored, stored.model_copy(update={"stages": (other,)}))
    assert seconds.startswith("stage 0: step_s 27.4")
    assert seconds.endswith("(+9 %)")
    assert size.startswith(f"stage 0: memory_bytes {figures.memory_bytes} -> {slower.memory_bytes} (")
    changed = [line for line in diff if line.startswith(("- ", "+ "))]
    assert changed == ["-      - layers: 1", f"+      - layers: {rules[0].layers}"]


def test_plans_fit_their_devices() -> None:
    for path, (job, _) in JOBS.items():
        for stage in load_plan(path).stages:
            assert 0.5 * job.memory_budget_bytes < stage.predicted.memory_bytes <= job.memory_budget_bytes, path.stem


@pytest.mark.parametrize("cluster", ["h100-80g", "h800-80g"])
def test_attention_is_never_recomputed_and_what_is_kept_is_offloaded(cluster: str) -> None:
    """What many ask stock Megatron for (its issue 1732), with long sequences cut among ranks: what is kept goes to the host
    within its own micro-batch; nobody waits for a copy."""
    path = CONFIGS / "plans" / f"llama3-70b-256k-{cluster}.yaml"
    plan, (job, _) = load_plan(path), JOBS[path]
    assert plan.parallel.context == job.parallel.context == 2
    assert all(ATTENTION.item("core").name in rule.keep for stage in plan.stages for rule in stage.rules)
    for stage in plan.stages[:6]:
        again = {"input_layernorm", "linear_qkv", "rotary"}
        assert sum(len(rule.layers) for rule in stage.rules if again <= set(rule.recompute)) >= 8
        assert stage.offload is not None
        assert stage.offload.half_by_half == "all"
        assert stage.offload.bytes > 0.2 * stage.predicted.resident_activation_bytes
        assert stage.predicted.exposed_copy_s == 0
