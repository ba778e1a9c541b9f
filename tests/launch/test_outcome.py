"""A run says how it came out, beside what its plan had predicted: printed, as a file, in figures that are true."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_lynx.anatomy import HALVES
from megatron_lynx.errors import ConfigError
from megatron_lynx.figures import Figures, InputSeen
from megatron_lynx.launch.reporter import Reporter, StepClock, largest_input, path_of, predicted_of, rows, step_input
from megatron_lynx.measure.run_outcome import (
    FILE_NAME,
    PlannedReserve,
    Report,
    RunOutcome,
    StageMeasured,
    StagePredicted,
    StageRow,
    lines,
    load_outcome,
    save_outcome,
)
from megatron_lynx.plan import load_plan
from megatron_lynx.plan.facts import PackedFacts
from megatron_lynx.planner import decide
from megatron_lynx.runtime.device import Clock, device_for
from megatron_lynx.runtime.engine import Engine
from megatron_lynx.units import GIB, format_bytes, format_seconds
from tests.tiny_jobs import tiny_job
from tests.uniform import uniform_plan

from ..profiler.made_up import made_up_profile
from .launched import MODEL, SIZE, flags_of, saved

JOB = tiny_job("gpt", pipeline=2, microbatches=4, **SIZE)


@pytest.fixture(scope="module")
def predicting():
    """A plan that says what it expects."""
    return decide(JOB, made_up_profile(JOB, 1e-5)).plan


def figures(stage: int, seconds: float = 1.0, allocated: int = 1000, **more) -> tuple[int, StageMeasured]:
    """A rank's stage, and its figures."""
    counted = {"in_windows": 4, "on_demand": 12, "in_windows_s": 0.25 * seconds, "on_demand_s": 0.125}
    measured = {"passes_s": seconds, "step_s": seconds + 0.5, "allocated_bytes": allocated}
    return stage, StageMeasured(ranks=1, **counted, **measured | more)


def report(plan, *ranks: tuple[int, StageMeasured]) -> Report:
    return Report(when="step", step=2, stages=rows(plan, ranks))


def test_of_a_stages_ranks_the_slowest_and_the_fullest_count(predicting):
    first, second = rows(predicting, [figures(1), figures(0, 2.0), figures(0, allocated=3000)])
    assert (first.measured.ranks, second.measured.ranks) == (2, 1)
    assert (first.measured.passes_s, first.measured.step_s, first.measured.in_windows_s) == (2.0, 2.5, 0.5)
    assert (first.measured.allocated_bytes, first.measured.reserved_bytes) == (3000, None)


def test_how_much_of_the_reserve_was_used_is_said_where_a_device_tells(predicting):
    """Of a stage's ranks the most counts; slack is the difference of one rank's peaks, not of two ranks'."""
    used = [{"outside_bytes": 4 * GIB, "slack_bytes": GIB}, {"outside_bytes": 5 * GIB, "slack_bytes": 100}]
    ranks = [figures(stage, **used_bytes) for stage, used_bytes in enumerate(used)]
    found = report(predicting, *ranks)
    words = "reserve: 5.00 GiB outside PyTorch's allocator (context, libraries, NCCL), 1.00 GiB reserved and not allocated"
    assert lines(found)[-1].strip() == words
    planned = found.model_copy(update={"reserve": PlannedReserve(outside_bytes=6 * GIB, slack_bytes=2 * GIB)})
    assert "reserve: 5.00 GiB of 6.00 GiB used outside PyTorch's" in lines(planned)[-1]
    assert "1.00 GiB of 2.00 GiB used reserved" in lines(planned)[-1]
    assert not [line for line in lines(report(predicting, figures(0), figures(1))) if "reserve:" in line], "on a CPU"


def test_what_a_plan_does_not_predict_is_said_and_is_no_zero(predicting):
    silent = uniform_plan(JOB)
    assert predicted_of(silent, 0) is None
    title, *table = lines(report(silent, figures(0), figures(1)))
    assert title == "step 2 of this run, beside what its plan predicts:"
    assert table[2].split()[:5] == ["0", "-", "1000", "B", "-"]
    assert table[-1] == "  the plan predicts nothing"
    known = predicted_of(predicting, 1)
    assert known is not None
    assert known.memory_bytes == predicting.stages[1].predicted.memory_bytes
    assert "predicts nothing" not in "\n".join(lines(report(predicting, figures(0), figures(1))))


def test_what_a_stage_is_predicted_to_recompute_is_that_of_all_its_chunks():
    plan = uniform_plan(tiny_job("gpt", pipeline=2, layers_per_chunk=1, microbatches=4, **SIZE))
    said = [{"step_s": 9.0, "hidden_recompute_s": 1.0 + at, "exposed_recompute_s": 0.5 + at} for at in range(4)]
    stages = [
        entry.model_copy(update={"predicted": entry.predicted.model_copy(update=figures)})
        for entry, figures in zip(plan.stages, said, strict=True)
    ]
    found = [predicted_of(plan.model_copy(update={"stages": tuple(stages)}), stage) for stage in range(2)]
    assert [(each.hidden_recompute_s, each.exposed_recompute_s, each.passes_s) for each in found] == [
        (4.0, 3.0, 9.0),
        (6.0, 5.0, 9.0),
    ]


def reported(plan, path, steps) -> Report:
    """What is told at the end of steps, each with the rows of its micro-batches and the load of experts."""
    device = device_for(torch.device("cpu"))
    peak = SimpleNamespace(counting=nullcontext, figures=lambda outside: {"allocated_bytes": 1})
    reporter = Reporter(engine := Engine(), device, peak, plan, 0, "plan.yaml", path)
    for rows_of_one, load in steps:
        with reporter.step({"forward_backward_func": lambda: None}, checked=False):
            for _ in range(plan.batch.microbatches if engine.met is not None else 0):
                engine.met.add(rows_of_one, rows_of_one * SIZE["seq"])
        reporter.step_ends(Figures(expert_load=load, fell_back=int(load > 1.4)))
    reporter.ends()
    return load_outcome(path).reports[-1]


def test_the_most_that_experts_got_in_any_step_is_told(predicting, tmp_path):
    report = reported(predicting, tmp_path / "o.json", [(FULL, 1.1), (FULL, 1.5), (FULL, 1.2)])
    assert (report.stages[0].measured.expert_load, report.stages[0].measured.fell_back) == (1.5, 1)


def test_what_came_is_that_of_the_steps_whose_seconds_are_told(predicting, tmp_path):
    """The third one is traced, so that it is longer, and none of these."""
    report = reported(predicting, tmp_path / "o.json", [(FULL, 1.0), (FULL, 1.0), (FULL // 2, 1.0), (FULL, 1.0)])
    assert report.met is None, "as planned"


def test_the_load_of_experts_is_told_beside_the_one_planned_for(predicting):
    """The largest of a stage's ranks, as it decides what has to fit."""

    def expert_lines(planned_load, *loads):
        ranks = [figures(0, expert_load=load) for load in loads]
        found = Report(when="end", step=9, stages=rows(predicting, ranks), planned_load=planned_load)
        return [line.strip() for line in lines(found) if "experts" in line]

    said = "experts: stage 0 had a rank with 1.37 of a balanced share of tokens, its plan was made for"
    assert expert_lines(1.0, 0.63, 1.37) == [f"{said} 1.00: expect more bytes and seconds than predicted"]
    assert expert_lines(1.5, 1.37, 0.63) == [f"{said} 1.50"]
    assert expert_lines(None, 0.0) == []


FULL = SIZE["seq"] * JOB.batch.micro
"""Tokens of a micro-batch."""


def met_of(plan, *came: tuple[int, int, float], steps: int = 1, shards: int = 1):
    """Micro-batches, rows of this rank and squares of lengths of each, as hooks count them."""
    seen = InputSeen()
    for microbatches, tokens, squares in came:
        for _ in range(microbatches):
            seen.add(tokens, squares)
    return step_input(plan, seen, steps, shards)


def packed_plan(plan, core_share: float, squares_per_token: float = SIZE["seq"]):
    packed = PackedFacts(squares_per_token=squares_per_token, core_share=core_share)
    return plan.model_copy(update={"batch": plan.batch.model_copy(update={"packed": packed})})


def test_what_came_as_planned_changes_nothing(predicting):
    """Whatever this rank has of each sequence. A rank that counted nothing says nothing."""
    whole = FULL * SIZE["seq"]
    one, cut = met_of(predicting, (4, FULL, whole)), met_of(predicting, (8, FULL // 2, whole), steps=2, shards=2)
    assert one == cut
    assert (one.passes, one.recomputations) == (1.0, 1.0)
    assert met_of(predicting) is None
    assert largest_input([one, cut, None]) is None


def test_predicted_seconds_are_those_for_what_came(predicting):
    """Two of four micro-batches, of half the tokens and a quarter of the squares: (2 + 1) / (4 + 1) of the passes, 2 / 4 of the
    recomputations; x (0.6 * 0.5 + 0.4 * 0.25) where attention's core takes 0.4 of a pass, x 0.5 where nobody knows."""
    came = (2, FULL // 2, FULL * SIZE["seq"] / 4)
    known, unknown = met_of(packed_plan(predicting, 0.4), came), met_of(predicting, came)
    assert (known.microbatches, known.tokens, known.squares) == (2.0, 0.5, 0.25)
    assert known.passes == pytest.approx(3 / 5 * 0.4)
    assert known.recomputations == pytest.approx(2 / 4 * 0.4)
    assert unknown.passes == pytest.approx(3 / 5 * 0.5)
    twice = met_of(packed_plan(predicting, 0.4), came, came, steps=2)
    assert twice == known, "what a step takes, of two that came alike"
    row = rows(predicting, [figures(0)])[0]
    found = Report(when="step", step=2, stages=(row,), met=known)
    scaled = found.predicted_of(row)
    assert scaled.passes_s == pytest.approx(0.24 * row.predicted.passes_s)
    assert scaled.exposed_recompute_s == pytest.approx(0.2 * row.predicted.exposed_recompute_s)
    assert scaled.memory_bytes == row.predicted.memory_bytes
    *_, what, how = (line.strip() for line in lines(found))
    assert what == "what came: 2 of 4 micro-batches, 50 % of their tokens, 25 % of the squares of lengths"
    assert how == "predicted seconds are for that: the plan's x 0.240; predicted bytes are the plan's, the most"
    printed = "\n".join(lines(found))
    assert format_seconds(0.24 * row.predicted.passes_s) in printed
    assert format_seconds(row.predicted.passes_s) not in printed
    said = lines(found.model_copy(update={"met": unknown}))[-1]
    assert "x 0.300, by tokens alone: the plan does not say what attention takes; " in said


def test_the_rank_with_most_to_do_is_waited_for(predicting):
    """Replicas get other lengths; where one had what was planned, the step took as long as that."""
    plan = packed_plan(predicting, 0.4)
    less, more = (met_of(plan, (4, tokens, FULL * SIZE["seq"] / 4)) for tokens in (FULL // 2, FULL))
    assert largest_input([less, more, None]) == more
    assert largest_input([less, met_of(plan, (4, FULL, FULL * SIZE["seq"]))]) is None
    assert largest_input([None, None]) is None


def test_halves_of_experts_that_fell_back_are_told(predicting):
    """Of the rank of each stage on which most did; all ranks that share out experts have as many."""
    ranks = [figures(stage, expert_load=1.5, fell_back=2 * stage) for stage in (0, 1)]
    found = Report(when="end", step=9, stages=rows(predicting, ranks), planned_load=1.2)
    fallback_lines = [line.strip() for line in lines(found) if "fell back" in line]
    said = "experts: 2 halves of a step fell back on stage 1, whose bytes hold for less: plan for more with"
    assert fallback_lines == [f"{said} --experts-hold"]


def test_columns_stand_below_their_names(predicting):
    _, heading, names, *table = lines(report(predicting, figures(0), figures(1)))
    assert len({len(line) for line in (heading, names, *table)}) == 1
    assert heading.index("whole") + len("whole") == names.index("step") + len("step")


def test_every_figure_stands_below_its_own_name():
    """What was predicted and what was measured of hidden recomputations once could change places, and nobody saw it."""
    predicted = StagePredicted(passes_s=1.0, memory_bytes=1024, hidden_recompute_s=2.0, exposed_recompute_s=3.0)
    measured = StageMeasured(
        ranks=1, passes_s=4.0, step_s=5.0, allocated_bytes=2048, reserved_bytes=4096, in_windows_s=6.0, on_demand_s=7.0
    )
    row = StageRow(stage=3, predicted=predicted, measured=measured.model_copy(update={"in_windows": 8, "on_demand": 9}))
    *_, names, figures = lines(Report(when="step", step=2, stages=(row,)))
    assert names.split() == ["stage", *BYTES, "predicted", "measured", "step", "predicted", "in", "windows", "predicted", *BEHIND]
    units = re.sub(r"(?<=\d) (?=[a-zA-Z])", "", figures).split()
    bytes_of = [format_bytes(size).replace(" ", "") for size in (1024, 2048, 4096)]
    seconds_of = [format_seconds(seconds).replace(" ", "") for seconds in (1.0, 4.0, 5.0, 2.0, 6.0, 3.0, 7.0)]
    assert units == ["3", *bytes_of, *seconds_of, "8", "+", "9"]


BYTES, BEHIND = ["predicted", "allocated", "reserved"], ["on", "demand", "+", "on", "demand"]


def outcome(predicting) -> RunOutcome:
    return RunOutcome(
        made_by="megatron-lynx",
        megatron_core="0.19.2",
        plan="plan.yaml",
        plan_digest=predicting.digest,
        ranks=2,
        finished=False,
        reports=(report(predicting, figures(0), figures(1)),),
    )


def test_an_outcome_comes_back_as_it_was(predicting, tmp_path):
    made = outcome(predicting)
    save_outcome(made, tmp_path / FILE_NAME)
    assert load_outcome(tmp_path / FILE_NAME) == made
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME], "nothing half-written beside it"


@pytest.mark.parametrize(
    ("spoilt", "says"),
    [
        (lambda text: text[: len(text) // 2], "JSON that breaks off"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "is from the future"),
        (lambda text: text.replace('"ranks": 2,', '"ranks": "all",', 1), "ranks"),
        (lambda text: "[]", "a list"),
        (lambda text: '{"traceEvents": []}', "traceEvents"),
    ],
    ids=["truncated", "from the future", "edited", "another file", "a trace"],
)
def test_a_file_that_is_no_outcome_is_refused(predicting, tmp_path, spoilt, says):
    path = tmp_path / FILE_NAME
    path.write_text(spoilt(json.dumps(outcome(predicting).model_dump(mode="json"), indent=1)))
    with pytest.raises(ConfigError, match=says):
        load_outcome(path)
    with pytest.raises(ConfigError, match="no such file"):
        load_outcome(tmp_path / "elsewhere.json")


def test_where_it_is_written():
    stated, trace = Path("a/own.json"), Path("b/trace.json")
    assert path_of(stated, trace, "c") == stated
    assert path_of(None, trace, "c") == Path("b") / FILE_NAME
    assert path_of(None, None, "c") == Path("c") / FILE_NAME
    assert path_of(None, None, None) is None


def test_only_steps_that_count_are_timed():
    clock = StepClock(device_for(torch.device("cpu")))
    assert not clock.steps(exact=True)
    for counts in (True, False, True):
        arguments = {"forward_backward_func": lambda value: value}
        with clock.step(arguments, counts=counts):
            assert arguments["forward_backward_func"](3) == 3
    found = clock.steps(exact=True)
    assert len(found) == 2
    assert all(0 <= step.passes_s <= step.step_s for step in found)


def test_what_is_timed_is_told_once_and_only_while_the_clock_runs():
    clock = Clock(device_for(torch.device("cpu")))
    clock.end("bwd.mlp.0@3", clock.begin())
    assert clock.take() == []
    clock.runs = True
    for where in ("bwd.mlp.0@3", "on_demand"):
        clock.end(where, clock.begin())
    (first, in_window_s), (second, on_demand_s) = clock.take()
    assert (first, second) == ("bwd.mlp.0@3", "on_demand")
    assert min(in_window_s, on_demand_s) > 0
    assert clock.take() == []


def test_a_launch_says_how_it_came_out(run, predicting, tmp_path):
    """The most that is held is what the plan says of this machine's ranks, whose every byte is counted."""
    plan = saved(predicting, tmp_path / "plan.yaml")
    flags = [*MODEL, *flags_of("pipeline 2"), "--train-iters", "4", "--lynx-plan", plan]
    launched = run(Path(__file__).with_name("pretrain_tiny.py"), [*flags, "--lynx-trace", tmp_path / "trace.json"], ranks=2)
    assert launched.status == 0, launched.text
    said = [line.removeprefix("megatron-lynx: ") for line in launched.ours]
    assert sum("beside what its plan predicts:" in line for line in said) == 2
    assert any(line.startswith("how this run of 4 steps came out") for line in said)
    found = load_outcome(tmp_path / FILE_NAME)
    assert found.finished
    assert found.plan_digest == load_plan(plan).digest
    assert [(each.when, each.step) for each in found.reports] == [("step", 1), ("step", 2), ("end", 4)]
    for each in found.reports:
        assert each.met is None
        for stage, row in enumerate(each.stages):
            assert row.predicted == predicted_of(predicting, stage)
            assert row.measured.passes_s is not None
            assert 0 < row.measured.passes_s <= row.measured.step_s
            assert row.measured.on_demand_s > 0
    recomputed = [bool(rule.recomputed_in(half)) for rule in predicting.stages[0].rules for half in HALVES for _ in rule.layers]
    recomputations = 4 * sum(recomputed)
    first = found.reports[-1].stages[0].measured
    assert first.in_windows + first.on_demand == recomputations
    for row in found.reports[1].stages:
        assert row.measured.allocated_bytes == pytest.approx(row.predicted.memory_bytes, rel=0.05)
        assert row.measured.reserved_bytes is None


def test_a_run_that_megatron_stops_says_how_it_came_out(run, predicting, tmp_path):
    """Its loop exits by itself, with status 0, for --exit-interval, --exit-duration-in-mins and a signal: what is told at the end
    was lost, and the outcome called the run unfinished. It has half as many micro-batches as planned, which is told, too."""
    plan = saved(predicting, tmp_path / "plan.yaml")
    flags = [*MODEL, *flags_of("pipeline 2"), "--global-batch-size", "4", "--exit-interval", "3", "--lynx-plan", plan]
    launched = run(Path(__file__).with_name("pretrain_tiny.py"), [*flags, "--lynx-outcome", tmp_path / FILE_NAME], ranks=2)
    assert launched.status == 0, launched.text
    assert "exiting program at iteration 3" in launched.text
    *_, table, done = launched.ours
    assert table.startswith("megatron-lynx: how this run of 3 steps came out")
    assert done.startswith("megatron-lynx: rank 0 recomputed ")
    found = load_outcome(tmp_path / FILE_NAME)
    assert found.finished
    assert [(each.when, each.step) for each in found.reports] == [("step", 1), ("step", 2), ("end", 3)]
    came = "what came: 2 of 4 micro-batches, 100 % of their tokens, 100 % of the squares of lengths"
    how = "predicted seconds are for that: the plan's x 0.600, by tokens alone: the plan does not say what attention takes; "
    assert launched.text.count(came) == launched.text.count(how) == 3, launched.text
    assert [each.met.passes for each in found.reports] == [pytest.approx(3 / 5)] * 3
