"""The launch of a script of our own through the `megatron.training` of the newest wheel, on ranks of this machine.

`make test` puts that wheel into build/megatron-core-0.19 and sets MEGATRON_CORE_0_19_DIR.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiny_jobs import tiny_job
from tests.uniform import uniform_plan

from ..long import long
from ..te_releases import folder_of
from .launched import MODEL, SIZE, TE, flags_of, launch, plan_of, saved

HERE = Path(__file__).parent
SCRIPT = HERE / "pretrain_tiny.py"
ONE_STAGE, TWO_STAGES = "tensor 2, sequence parallel", "tensor 2 x pipeline 2, sequence parallel"
RANKS = {ONE_STAGE: 2, TWO_STAGES: 4}


@pytest.fixture(scope="module", params=[ONE_STAGE, *long(TWO_STAGES)])
def layout(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory, layout) -> Path:
    return tmp_path_factory.mktemp("launch")


@pytest.fixture(scope="module")
def layout_flags(layout) -> list[str]:
    return [*MODEL, *flags_of(layout)]


@pytest.fixture(scope="module")
def stock(run, folder, layout, layout_flags):
    return run(SCRIPT, [*layout_flags, "--save", folder / "stock", "--save-interval", "3"], ranks=RANKS[layout])


@pytest.fixture(scope="module")
def planned(run, folder, layout, layout_flags):
    """Everything recomputed, its inputs gathered once, and the first two steps checked."""
    plan = saved(plan_of(layout, gather="once"), folder / "once.yaml")
    flags = ["--lynx-plan", plan, "--lynx-trace", folder / "trace.json", "--save", folder / "planned", "--save-interval", "3"]
    flags += ["--lynx-check", "2"]
    return run(SCRIPT, [*layout_flags, *flags], ranks=RANKS[layout])


def test_every_printed_digit_is_stocks(stock, planned):
    assert (stock.status, planned.status) == (0, 0), planned.text
    assert len(stock.iterations) == 5
    assert planned.iterations == stock.iterations


def test_it_says_what_it_does(stock, planned, layout):
    assert stock.ours == []
    begun, checked, traced, *measured, done = planned.ours
    assert "once.yaml" in begun
    assert "megatron-core 0.19." in begun
    assert checked.startswith("megatron-lynx: checked 2 steps against stock without recomputation: in each, 8 losses and ")
    assert checked.endswith(f" on {RANKS[layout]} ranks) are equal in every bit")
    assert traced.startswith("megatron-lynx: step 3 of this run is traced in ")
    assert [line.split(" of ")[0] for line in measured[:2]] == ["megatron-lynx: step 4", "megatron-lynx: step 5"]
    assert measured[2].startswith("megatron-lynx: how this run of 5 steps came out ")
    assert "  the plan predicts nothing" in planned.text
    # 5 steps x 4 micro-batches x its layers x 2 halves; behind its first half a stage that gathers has no window in steady state
    halves = 5 * 4 * 2 * (4 if layout == ONE_STAGE else 2)
    assert done == f"megatron-lynx: rank 0 recomputed {halves} layer halves: {halves - 20} inside windows, 20 on demand"


def test_flags_are_among_megatrons(planned):
    assert "  lynx_plan ......" in planned.text, "Megatron logs its arguments"


def test_a_trace_holds_one_step_of_all_ranks(planned, folder, layout):
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    recomputations = [event for event in events if event.get("cat") == "recompute"]
    assert {event["pid"] for event in recomputations} == set(range(RANKS[layout]))
    assert len([event for event in recomputations if event["pid"] == 0]) == 4 * 2 * (4 if layout == ONE_STAGE else 2)


@pytest.fixture(scope="module")
def stock_resumed(run, folder, layout, layout_flags, stock):
    return run(SCRIPT, [*layout_flags, "--load", at_step_3(folder / "stock")], ranks=RANKS[layout])


def at_step_3(checkpoints: Path) -> Path:
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("3")
    return checkpoints


@pytest.mark.parametrize("plan", ["another", *long("none")])
def test_a_run_resumes_under_another_plan(run, folder, layout, layout_flags, stock, planned, stock_resumed, plan):
    """From what was saved under a plan at step 3, against stock that resumes what stock saved."""
    flags = []
    if plan == "another":
        flags = ["--lynx-plan", saved(plan_of(layout, recompute=("activation", "core_attention")), folder / "another.yaml")]
    resumed = run(SCRIPT, [*layout_flags, *flags, "--load", at_step_3(folder / "planned")], ranks=RANKS[layout])
    assert [number for number, _, _ in resumed.iterations] == ["4", "5"]
    assert resumed.iterations == stock_resumed.iterations
    assert resumed.iterations[0] == stock.iterations[3]


@pytest.mark.long
def test_as_the_ready_launches_have_it(tmp_path):
    """The flags of scripts/launches/launch.sh and Transformer Engine's layers, its compiled extension stood in for."""
    wheel = folder_of("MEGATRON_CORE", "0.19", "megatron/training")
    te = folder_of("TRANSFORMER_ENGINE", "2.17", "transformer_engine")
    job = tiny_job("gpt", tensor=2, sequence_parallel=True, microbatches=4, implementation="transformer_engine", **SIZE)
    plan = saved(uniform_plan(job, gather="once"), tmp_path / "te.yaml")
    flags = [flag for flag in MODEL if flag != "--no-gradient-accumulation-fusion"]
    flags += [*TE, "--bf16", "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    flags += ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--train-iters", "2"]
    flags += ["--lynx-plan", plan, "--lynx-check", "2"]
    checked = launch(HERE / "pretrain_faulty.py", flags, ranks=2, path=[wheel, te], env={"FAULT": "none"}, as_users_do=True)
    assert checked.status == 0, checked.text
    _, compared, done = checked.ours
    assert compared.startswith("megatron-lynx: checked 2 steps against stock without recomputation: in each, 8 losses and ")
    # 2 steps x 4 micro-batches x 4 layers x 2 halves; the first of each backward has no window
    assert done == "megatron-lynx: rank 0 recomputed 64 layer halves: 56 inside windows, 8 on demand"


def without_traceback_of_ours(launched) -> bool:
    return "/megatron_lynx/" not in launched.text


def test_a_plan_for_another_launch(run, tmp_path):
    """All that is wrong is said, once."""
    plan = saved(plan_of("1"), tmp_path / "one.yaml")
    flags = [*MODEL, "--tensor-model-parallel-size", "2", "--micro-batch-size", "1", "--recompute-activations"]
    refused = run(SCRIPT, [*flags, "--lynx-plan", plan, "--lynx-trace", "/proc/trace.json"], ranks=2)
    assert refused.status != 0
    headline, *problems = refused.ours
    assert headline == "megatron-lynx: this launch and its plan do not fit"
    assert [problem.split(":")[0].strip(" -") for problem in problems] == [
        "tensor-model-parallel-size",
        "micro-batch-size",
        "recompute-granularity",
        "rank 0",
    ]
    assert "--recompute-activations: the plan decides what is recomputed" in refused.text
    assert "--lynx-trace: found /proc/trace.json (" in refused.text
    assert refused.iterations == []
    assert without_traceback_of_ours(refused)


def test_a_plan_that_one_rank_has_not(run, tmp_path, monkeypatch):
    """Rank 0 could go on, and would wait for rank 1 in its next collective."""
    saved(plan_of("1"), tmp_path / "here.yaml")
    monkeypatch.chdir(tmp_path)
    refused = run(HERE / "pretrain_elsewhere.py", [*MODEL, "--lynx-plan", "here.yaml"], ranks=2)
    assert refused.status != 0
    assert len(refused.ours) == 2
    assert refused.ours[1].startswith("  - rank 1: here.yaml: found no such file")
    assert without_traceback_of_ours(refused)
