"""The plans that come with the package are what their jobs lead to today, and can be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron_lynx.anatomy import ATTENTION
from megatron_lynx.plan import load_plan
from megatron_lynx.plan.explanation import explanation
from scripts.make_plans import CONFIGS, jobs, plan_text

JOBS = {path: (job, note) for path, job, note in jobs()}
SEEN_TO = {
    f"{model}-{cluster}"
    for model in ("gpt-22b", "gpt-175b", "llama-7b", "llama-65b", "llama2-70b", "llama3-8b", "llama3-70b")
    for cluster in ("a100-80g", "h800-80g")
}


LONG_TO_PLAN = ("deepseek-v3", "llama3-405b-128k", "llama3-70b-256k")
"""Models whose plan alone takes as long as those of three others."""


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
@pytest.mark.slow
def test_a_plan_is_current_and_explained(path: Path, tmp_path: Path) -> None:
    job, note = JOBS[path]
    (tmp_path / path.name).write_text(plan_text(job, note))
    made, kept = load_plan(tmp_path / path.name), load_plan(path)
    todo = "run `python -m scripts.make_plans`"
    assert [stage.model_copy(update={"predicted": None}) for stage in made.stages] == [
        stage.model_copy(update={"predicted": None}) for stage in kept.stages
    ], todo
    for new, old in zip(made.stages, kept.stages, strict=True):
        found, kept_figures = new.predicted.model_dump(), old.predicted.model_dump()
        assert found.pop("memory") == {moment: pytest.approx(kinds) for moment, kinds in kept_figures.pop("memory").items()}, todo
        assert found == pytest.approx(kept_figures, rel=1e-9), todo
    assert (made.model, made.parallel, made.batch, made.provenance.job) == (
        kept.model,
        kept.parallel,
        kept.batch,
        kept.provenance.job,
    ), todo
    console = Console(width=150)
    with console.capture() as shown:
        console.print(explanation(kept))
    assert f"--pipeline-model-parallel-size {job.parallel.pipeline}" in shown.get()
    assert note[:60] in shown.get()


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
        again = {"input_layernorm", "linear_qkv", "rotary", "activation"}
        assert sum(len(rule.layers) for rule in stage.rules if again <= set(rule.replay)) >= 8
        assert stage.offload is not None
        assert stage.offload.half_by_half == "all"
        assert stage.offload.bytes > 0.2 * stage.predicted.resident_activation_bytes
        assert stage.predicted.exposed_copy_s == 0
