"""What a run teaches the next plan: the arithmetic, what is refused, what is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_lynx.config import Job, load_job
from megatron_lynx.cost.update import reduction_s
from megatron_lynx.errors import ConfigError
from megatron_lynx.figures import Learned
from megatron_lynx.from_run import Lesson, lesson
from megatron_lynx.launch.reporter import predicted_of, reserve_of
from megatron_lynx.measure.run_outcome import (
    PartSeconds,
    Report,
    RunOutcome,
    StageMeasured,
    StageRow,
    StepInput,
    load_outcome,
    save_outcome,
)
from megatron_lynx.plan import Plan, load_plan, save_plan
from megatron_lynx.planner import decide
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.profile import LinkPoint, as_learned
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.units import GIB
from tests.profiler.made_up import made_up_profile
from tests.report.samples import tiles_in
from tests.test_cli import lynx
from tests.tiny_jobs import tiny_job

NAME = "jobs/llama3-8b-a100-80g"
MORE = (3 * GIB // 2, -GIB // 2)
"""What each stage held beyond its prediction."""


@pytest.fixture(scope="module")
def job() -> Job:
    return load_job(NAME)


@pytest.fixture(scope="module")
def costs(job: Job) -> Any:
    return analytic_profile(job)


@pytest.fixture(scope="module")
def plan(job: Job, costs: Any) -> Plan:
    return decide(job, costs).plan


def run_of(plan: Plan, times: float = 1.05, more: tuple[int, ...] = MORE, **changes: Any) -> RunOutcome:
    """A run whose passes took so many times longer, and whose stages held so much more, than predicted."""
    stages = []
    for stage, extra in enumerate(more):
        predicted = predicted_of(plan, stage)
        assert predicted is not None
        assert predicted.passes_s is not None
        assert predicted.memory_bytes is not None
        own = {"passes_s": times * predicted.passes_s, "allocated_bytes": predicted.memory_bytes + extra}
        measured = StageMeasured(ranks=1, **own, outside_bytes=6 * GIB, slack_bytes=2 * GIB)
        stages.append(StageRow(stage=stage, predicted=predicted, measured=measured))
    origin = plan.provenance
    facts = {
        "made_by": "a test",
        "megatron_core": "0.19.2",
        "plan": "plan.yaml",
        "plan_digest": plan.digest,
        "job_digest": origin.job,
        "profile_digest": origin.profile,
        "asked": NAME,
        "learned": origin.learned,
        "ranks": 2,
        "finished": True,
        "reports": (Report(when="end", step=20, stages=tuple(stages), reserve=reserve_of(plan)),),
    }
    return RunOutcome(**{**facts, **changes})


def learned_plan(found: Lesson, job: Job, costs: Any) -> Plan:
    """As the command makes it."""
    made = decide(found.job(job), found.costs(costs)).plan
    return made.model_copy(update={"provenance": made.provenance.model_copy(update=found.origin)})


def test_the_next_plan_predicts_what_was_measured_and_keeps_the_budget(job, costs, plan):
    found = lesson(run_of(plan, times=1.0), job, costs, "o.json")
    again = learned_plan(found, job, costs)
    assert found.learned.seconds == pytest.approx(1 - reduction_s(job) / plan.stages[0].predicted.step_s)
    assert found.learned.beside_bytes == MORE
    assert again.stages[0].predicted.memory["always"]["learned"] == MORE[0]
    assert again.stages[1].predicted.memory["always"]["learned"] == MORE[1]
    assert all(entry.predicted.memory_bytes <= job.memory_budget_bytes for entry in again.stages)
    first, second = (each.stages[0].predicted.resident_activation_bytes for each in (plan, again))
    assert second < first, "stage 0 gives up what it held beyond its prediction"


def came(plan: Plan, **changes: Any) -> StepInput:
    facts = {"microbatches": plan.batch.microbatches, "planned_microbatches": plan.batch.microbatches, "by_squares": True}
    return StepInput(**{**facts, "tokens": 1.0, "squares": 1.0, "passes": 1.0, "recomputations": 1.0, **changes})


def told_that(run: RunOutcome, met: StepInput) -> RunOutcome:
    return run.model_copy(update={"reports": (run.reports[-1].model_copy(update={"met": met}),)})


def test_micro_batches_that_were_not_full_teach_no_prices_and_no_bytes(job, costs, plan):
    """Half as full, they took 0.55 of the plan's seconds, 1.1 times what it says for them; prices would have been halved, and
    each stage's bytes been less by what did not come."""
    met = came(plan, tokens=0.5, squares=0.5, passes=0.5, recomputations=0.5)
    reduction = reduction_s(job) / plan.stages[0].predicted.step_s
    found = lesson(told_that(run_of(plan, times=0.55 + reduction), met), job, costs, "o.json", plan)
    assert found.learned.seconds == pytest.approx(1.1)
    assert (found.learned.beside_bytes, found.prices, found.stages) == ((0, 0), (), (None, None))
    said = "\n".join(found.lines)
    assert "not learned: bytes: micro-batches had 50 % of the tokens that a plan's bytes are for" in said
    assert "not learned: seconds of halves and waits: micro-batches were not as full, or as long, as planned" in said


def test_fewer_full_micro_batches_teach_everything(job, costs, plan):
    """Only the step is shorter."""
    fewer = came(plan, microbatches=plan.batch.microbatches / 2, passes=0.5, recomputations=0.5)
    reduction = reduction_s(job) / plan.stages[0].predicted.step_s
    whole = lesson(run_of(plan, times=1.1 + reduction), job, costs, "o.json", plan)
    half = lesson(told_that(run_of(plan, times=0.55 + reduction), fewer), job, costs, "o.json", plan)
    assert half.learned.seconds == pytest.approx(whole.learned.seconds)
    assert half.learned.beside_bytes == whole.learned.beside_bytes == MORE


def test_a_plan_that_does_not_change_predicts_the_measured_seconds_and_bytes():
    """Without a budget the plan with the least memory is made, with whatever prices."""
    job = tiny_job("gpt", pipeline=2, microbatches=4)
    costs = made_up_profile(job, 1e-5)
    plan = decide(job, costs).plan
    found = lesson(run_of(plan, 1.25, (1000, -500)), job, costs, "o.json")
    again = learned_plan(found, job, costs)
    for entry, before, more in zip(again.stages, plan.stages, (1000, -500), strict=True):
        assert entry.predicted.step_s == pytest.approx(1.25 * before.predicted.step_s)
        assert entry.predicted.memory_bytes == before.predicted.memory_bytes + more
    assert (again.provenance.job, again.provenance.profile) == (job.digest, costs.digest), "what was asked, not what was learned"


def test_a_third_plan_learns_from_the_second_run_beside_the_first(job, costs, plan):
    """Factors multiply, offsets add up: the second run is beside a prediction that has the first in it."""
    first = lesson(run_of(plan), job, costs, "o.json")
    again = learned_plan(first, job, costs)
    outcome = run_of(again, 1.02, (100, 200))
    second = lesson(outcome, job, costs, "o.json").learned
    assert second.beside_bytes == (MORE[0] + 100, MORE[1] + 200)
    last_s = outcome.reports[-1].stages[0].measured.passes_s
    assert last_s is not None
    own = (last_s - reduction_s(job)) / again.stages[0].predicted.step_s
    assert second.seconds == pytest.approx(first.learned.seconds * own)


def test_what_others_use_of_the_device_lowers_the_budget_and_never_raises_it(job, costs, plan):
    roomy = job.model_copy(update={"budget": job.budget.model_copy(update={"memory_gib": 75.0})})
    outcome = run_of(plan, job_digest=roomy.digest)
    found = lesson(outcome, roomy, costs, "o.json")
    left = roomy.device_reserve.memory_bytes - 8 * GIB
    assert found.budget == (75 * GIB, left)
    assert found.job(roomy).memory_budget_bytes == left < 75 * GIB
    tight = lesson(run_of(plan), job, costs, "o.json")
    assert tight.job(job).memory_budget_bytes == job.memory_budget_bytes, "64.6 GiB were stated, and are there"


def test_bytes_that_were_not_measured_are_not_learned_and_it_says_so(job, costs, plan):
    outcome = run_of(plan)
    last = outcome.reports[-1]
    silent = {"allocated_bytes": None, "outside_bytes": None, "slack_bytes": None}
    rows = [row.model_copy(update={"measured": row.measured.model_copy(update=silent)}) for row in last.stages]
    found = lesson(outcome.model_copy(update={"reports": (last.model_copy(update={"stages": tuple(rows)}),)}), job, costs, "o")
    assert found.learned.beside_bytes == (0, 0)
    assert found.budget is None
    assert "  not learned: bytes of stages 0, 1: not measured, or not predicted" in found.lines


def test_every_second_of_passes_is_scaled_and_copies_to_the_host_are_not():
    profile = made_up_profile(tiny_job(), 1e-3, head_summand_s=0.5)
    profile = profile.model_copy(update={"links": (*profile.links, LinkPoint(kind="host", bytes=10, seconds=1.0))})
    found = as_learned(profile, Learned(seconds=2.0, mlp=1.5, collectives=0.25))
    for half, times in (("attention", 2.0), ("mlp", 3.0)):
        for name, item in getattr(profile, half).items.items():
            own = getattr(found, half).items[name]
            for seconds in ("forward_s", "backward_s", "dgrad_s", "wgrad_s"):
                assert getattr(own, seconds) == times * getattr(item, seconds)
            assert own.saved_bytes == item.saved_bytes
    assert found.head_summand_s == 1.0
    assert found.link_s("p2p", 1000) == 2 * profile.link_s("p2p", 1000) > 0
    assert found.link_s("all_reduce", 1000) == 0.5 * profile.link_s("all_reduce", 1000) > 0
    assert found.link_s("host", 10) == 1.0


def test_experts_learn_what_they_compute_apart_from_their_exchanges():
    profile = analytic_profile(load_job("jobs/mixtral-8x7b-h100-80g"))
    was = profile.experts
    found = as_learned(profile, Learned(experts=1.5, exchanges=3.0, collectives=2.0)).experts
    assert was is not None
    assert found is not None
    assert was.exchange_s > 0
    assert found.exchange_s == 3 * was.exchange_s
    assert found.collective_s == 2 * was.collective_s
    assert sum(item.forward_s for item in found.items.values()) == pytest.approx(
        1.5 * sum(item.forward_s for item in was.items.values())
    )


def traced(outcome: RunOutcome, job: Job, costs: Any, attention: float, mlp: float, collectives: float) -> RunOutcome:
    """The same run, in which a step was traced whose halves and waits took so many times longer than the profile says."""
    calls = job.microbatches * job.model.layers // job.parallel.pipeline
    parts = {}
    for name, half, times in (("attention", costs.attention, attention), ("mlp", costs.mlp, mlp)):
        both_s = sum(item.forward_s + item.backward_s for item in half.items.values())
        parts[name] = PartSeconds(count=calls, seconds=calls * times * both_s)
    length_s = collectives * costs.link_s("all_reduce", LayerShape.of(job).gathered_bytes)
    parts |= {"fwd.attention.0": PartSeconds(count=3, seconds=3 * length_s), "bwd.mlp.0": PartSeconds(count=2, seconds=1.0)}
    last = outcome.reports[-1]
    measured = (row.measured.model_copy(update={"parts": parts}) for row in last.stages)
    rows = [row.model_copy(update={"measured": each}) for row, each in zip(last.stages, measured, strict=True)]
    return outcome.model_copy(update={"reports": (last.model_copy(update={"stages": tuple(rows)}),)})


@pytest.fixture(scope="module")
def small() -> tuple[Job, Any, Plan]:
    job = tiny_job("gpt", tensor=2, pipeline=2, microbatches=4)
    costs = made_up_profile(job, 1e-5)
    return job, costs, decide(job, costs).plan


def test_halves_and_collectives_are_learned_each_by_itself(small):
    """All of a step was scaled alike: attention that took longer made MLPs and collectives seem longer, too."""
    job, costs, plan = small
    truth = as_learned(costs, Learned(attention=1.5, mlp=1.1, collectives=0.75))
    step_s = rehearse(plan, truth).step_s
    run = run_of(plan, step_s / plan.stages[0].predicted.step_s, (0, 0))
    found = lesson(traced(run, job, costs, 1.5, 1.1, 0.75), job, costs, "o.json", plan)
    assert [price.part for price in found.prices] == ["attention halves", "MLP halves", "collectives"]
    learned = found.learned
    assert (learned.attention, learned.mlp, learned.collectives) == pytest.approx((1.5, 1.1, 0.75))
    assert learned.seconds == pytest.approx((step_s - reduction_s(job)) / step_s), "nothing is left to explain"
    text = "\n".join(found.lines)
    assert "  attention halves   " in text
    assert "x 1.500" in text
    assert not found.not_learned
    other = decide(job.model_copy(update={"policy": "planned"}), truth).plan
    one_factor = lesson(run, job, costs, "o.json")
    true_s = rehearse(other, truth).step_s
    by_parts, by_all = (rehearse(other, each.costs(costs)).step_s for each in (found, one_factor))
    assert abs(by_parts - true_s) <= abs(by_all - true_s)


def test_a_second_run_multiplies_what_the_first_has_taught(small):
    job, costs, plan = small
    first = lesson(traced(run_of(plan, 1.2, (0, 0)), job, costs, 1.5, 1.1, 1.0), job, costs, "o.json", plan)
    again = learned_plan(first, job, costs)
    expected = first.costs(costs)
    second = lesson(traced(run_of(again, 1.0, (0, 0)), job, expected, 1.1, 1.0, 1.0), job, costs, "o.json", again)
    assert second.learned.attention == pytest.approx(1.5 * 1.1)
    assert second.learned.mlp == pytest.approx(1.1)


def test_without_the_runs_plan_or_a_traced_step_passes_are_learned_as_a_whole(small):
    job, costs, plan = small
    run = run_of(plan, 1.25, (0, 0))
    for outcome, own, why in (
        (run, plan, "no step of the run was traced"),
        (traced(run, job, costs, 1.5, 1.1, 1.0), None, "plan.yaml, the run's plan, is not there any more"),
    ):
        found = lesson(outcome, job, costs, "o.json", own)
        assert found.learned.attention == 1.0
        assert found.learned.seconds > 1.2
        assert why in found.not_learned[-1]


def test_a_part_that_took_many_times_longer_is_not_learned(small):
    job, costs, plan = small
    found = lesson(traced(run_of(plan, 1.25, (0, 0)), job, costs, 40.0, 1.1, 1.0), job, costs, "o.json", plan)
    assert (found.learned.attention, found.learned.mlp) == (1.0, pytest.approx(1.1))
    assert "attention halves: x 40 is another machine's" in found.not_learned


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"job_digest": "0" * 64}, ["job_digest: found 000000000000...", f"megatron-lynx plan --from-run o.json -o PLAN {NAME}"]),
        ({"job_digest": None}, ["job_digest: found nothing"]),
        ({"profile_digest": "0" * 64}, ["profile_digest: found 000000000000...", "--profile"]),
        ({"finished": False}, ["finished: found false", "--exit-interval"]),
        ({"checked": True}, ["checked: found true", "without --lynx-check"]),
        ({"times": 2.5}, ["passes_s: found", "another machine's run?"]),
        ({"times": 0.3}, ["passes_s: found", "another machine's run?"]),
        ({"more": (-50 * GIB, 0)}, ["stage 0, allocated_bytes: found", "another machine's run?"]),
        ({"more": (0,)}, ["stages: found 0, needed 0 to 1"]),
        ({"times": 3.0, "finished": False, "checked": True}, ["finished", "checked", "passes_s"]),
    ],
    ids=[
        *("another job", "no job", "another profile", "unfinished", "checked", "too slow", "too fast", "too small"),
        *("a stage lacks", "several"),
    ],
)
def test_a_run_that_teaches_nothing_is_refused(job, costs, plan, changes, says):
    with pytest.raises(ConfigError) as caught:
        lesson(run_of(plan, **changes), job, costs, "o.json")
    assert len(caught.value.problems) == (3 if len(changes) == 3 else 1)
    for words in says:
        assert words in str(caught.value)


def test_a_short_run_is_refused(job, costs, plan):
    outcome = run_of(plan)
    short = outcome.reports[-1].model_copy(update={"step": 4})
    with pytest.raises(ConfigError, match="reports: found 4 steps, needed at least 5"):
        lesson(outcome.model_copy(update={"reports": (short,)}), job, costs, "o.json")


def test_the_command_says_which_prices_moved_and_writes_where_they_are_from(job, plan, tmp_path: Path):
    save_outcome(run_of(plan), tmp_path / "o.json")
    asked = ["plan", NAME, "--from-run", tmp_path / "o.json", "-o", tmp_path / "plan.yaml"]
    said = lynx(*asked)
    assert said.exit_code == 0, said.output
    was = [format(entry.predicted.memory_bytes / GIB, ".2f") for entry in plan.stages]
    assert f"learned from {tmp_path / 'o.json'} (20 steps): was -> is" in said.stdout
    assert f"  stage 0 at its peak   {was[0]} GiB -> {float(was[0]) + 1.5:.2f} GiB   +1.50 GiB" in said.stdout
    assert f"  stage 1 at its peak   {was[1]} GiB -> {float(was[1]) - 0.5:.2f} GiB   -512.00 MiB" in said.stdout
    assert "  budget of a device   64.60 GiB, kept" in said.stdout
    written = load_plan(tmp_path / "plan.yaml").provenance
    assert (written.job, written.profile) == (plan.provenance.job, plan.provenance.profile)
    assert isinstance(written.learned, Learned)
    assert written.learned.beside_bytes == MORE
    learned = json.loads(lynx(*asked, "--json").stdout)["from_run"]
    assert learned["peak_bytes"][0]["is"] - learned["peak_bytes"][0]["was"] == MORE[0]
    assert learned["passes_s"]["times"] == pytest.approx(written.learned.seconds)
    assert learned["budget_bytes"]["was"] == learned["budget_bytes"]["is"] == job.memory_budget_bytes
    assert written.asked == f"--from-run {tmp_path / 'o.json'} {NAME}"


def test_whoever_prices_a_learned_plan_takes_what_was_learned(job, costs, plan, tmp_path: Path):
    """`simulate` and `report` said of a plan from a run what the profile said, not what the run had shown."""
    learned = lesson(run_of(plan, times=1.25), job, costs, "o.json")
    again = learned_plan(learned, job, costs)
    save_plan(again, tmp_path / "plan.yaml")
    predicted = again.stages[0].predicted
    told_s = predicted.step_s + predicted.update_s
    said = lynx("simulate", tmp_path / "plan.yaml", "--job", NAME, "--json")
    assert json.loads(said.stdout)["step_s"] == pytest.approx(told_s, rel=1e-9)
    page = tmp_path / "report.html"
    assert lynx("report", tmp_path / "plan.yaml", NAME, "--budgets", 0, "-o", page).exit_code == 0
    assert tiles_in(page.read_text())["step"][0] == pytest.approx(told_s, rel=1e-9)
    folder = tmp_path / "compared"
    rows = lynx("compare", "--simulate", "--plan", tmp_path / "plan.yaml", "-o", folder, "--json", NAME)
    assert rows.exit_code == 0, rows.output
    (ours,) = [row for row in json.loads(rows.stdout)["rows"] if row["ours"]]
    assert ours["step_s"] == pytest.approx(told_s, rel=1e-9)
    assert ours["device_bytes"] == pytest.approx(max(entry.predicted.memory_bytes for entry in again.stages))


def test_a_second_run_is_asked_for_without_the_first(job, costs, plan):
    outcome = run_of(plan, job_digest="0" * 64, asked=f"--from-run first.json {NAME}")
    with pytest.raises(ConfigError, match=f"--from-run o.json -o PLAN {NAME}"):
        lesson(outcome, job, costs, "o.json")


def test_a_machine_without_figures_needs_the_profile_of_the_runs_plan(plan, tmp_path: Path):
    """Without one it would be measured anew, and corrected by what was measured beside other figures."""
    save_outcome(run_of(plan), tmp_path / "o.json")
    said = lynx("plan", "jobs/demo", "--from-run", tmp_path / "o.json", "-o", tmp_path / "plan.yaml")
    assert said.exit_code == 2
    assert "--profile: found nothing, needed the profile that plan.yaml was made with" in said.stderr
    assert not (tmp_path / "plan.yaml").exists()


def test_outcomes_from_before_can_be_read_and_their_profile_is_not_asked_for(job, costs, plan, tmp_path: Path):
    save_outcome(run_of(plan), tmp_path / "o.json")
    old = json.loads((tmp_path / "o.json").read_text())
    for name in ("profile_digest", "asked", "learned", "checked"):
        del old[name]
    (tmp_path / "o.json").write_text(json.dumps(old))
    assert lesson(load_outcome(tmp_path / "o.json"), job, costs, "o.json").learned.beside_bytes == MORE
