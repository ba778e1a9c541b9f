"""Plans rehearsed: what they hold and take is what the planner's own formulas say, and windows never cost time."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from megatron_lynx.config.job import Budget
from megatron_lynx.config.loader import job_path, load_job
from megatron_lynx.config.parallel import Overlap
from megatron_lynx.cost.section import Prices
from megatron_lynx.cost.stage import stage_seconds
from megatron_lynx.errors import PlanMismatch
from megatron_lynx.plan.facts import LayerRange
from megatron_lynx.plan.plan import Plan
from megatron_lynx.plan.timetables import planned_halves
from megatron_lynx.planner import decide, make_plan
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.profile import LinkPoint, Profile
from megatron_lynx.rehearsal import RehearsedStage, rehearse, treated_halves
from megatron_lynx.simulator.figures import as_json
from megatron_lynx.solver.stages import Stages
from megatron_lynx.testbed.candidates import without_windows
from megatron_lynx.units import MIB
from tests import layouts
from tests.config.jobs import catalogued_job
from tests.profiler.made_up import made_up_profile
from tests.tiny_jobs import tiny_job
from tests.uniform import uniform_plan

LAYOUTS = {
    **layouts.LAYOUTS,
    "few micro-batches": {"tensor": 2, "pipeline": 4, "microbatches": 2},
}
CHUNKED = {
    "pp": {"pipeline": 2, "layers_per_chunk": 1, "microbatches": 4},
    "tp": {"tensor": 2, "pipeline": 2, "layers": 8, "layers_per_chunk": 2, "microbatches": 6},
    "groups of 4": {"tensor": 2, "pipeline": 2, "layers": 8, "layers_per_chunk": 2, "microbatches": 8, "microbatch_group": 4},
    "a smaller last group": {"tensor": 2, "pipeline": 2, "layers_per_chunk": 1, "microbatches": 5, "microbatch_group": 3},
    "tp+sp": {"tensor": 2, "pipeline": 4, "layers": 8, "layers_per_chunk": 1, "microbatches": 8, "sequence_parallel": True},
    "other layers": {"tensor": 2, "pipeline": 2, "layers": 8, "partition": (1, 2, 3, 2), "microbatches": 4},
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
every_policy = pytest.mark.parametrize("policy", ["none", "full", "planned"])
every_link = pytest.mark.parametrize("link_s", [1e-9, 1e-5, 1.0])


def job_of(layout, policy="planned"):
    return tiny_job("llama", **layout).model_copy(update={"policy": policy})


@every_layout
@every_policy
@every_link
def test_a_stage_holds_at_most_what_the_planner_said(layout, policy, link_s):
    job = job_of(layout, policy)
    profile = made_up_profile(job, link_s)
    simulation = rehearse(make_plan(job, profile), profile, job=job)
    for stage in range(job.parallel.pipeline):
        assert simulation.memory(stage).bytes[-1] == 0, "nothing survives the step"
        assert simulation.memory(stage).peak_bytes == Stages(job, profile).answer(stage).peak_bytes


@every_layout
@every_link
def test_a_pass_takes_what_the_parts_of_its_stage_take(layout, link_s):
    job = job_of(layout, "none")
    profile = made_up_profile(job, link_s)
    plan = make_plan(job, profile)
    for stage in plan.stages:
        entries = plan.chunks_of(stage.stage)
        passes = RehearsedStage(plan, stage.stage, Prices(profile)).passes()[entries.index(stage)]
        expected = stage_seconds(job, profile, stage.stage)
        for phase in ("warmup", "steady", "cooldown"):
            assert passes.one("F", phase).seconds == pytest.approx(expected.forward_s)
            assert passes.one("B", phase).seconds == pytest.approx(expected.backward_s)


@every_layout
@every_link
@pytest.mark.parametrize("interference", [1.0, 1.3])
@pytest.mark.parametrize("recompute", ["all", ("input_layernorm", "activation", "core_attention")])
@pytest.mark.parametrize("gather", ["keep", "once"])
def test_recomputations_in_windows_are_never_slower_than_on_demand(layout, link_s, interference, recompute, gather):
    job = job_of(layout)
    profile = made_up_profile(job, link_s, interference=interference)
    plan = uniform_plan(job, recompute, gather=gather)
    windows, demand = rehearse(plan, profile), rehearse(without_windows(plan), profile)
    assert windows.step_s <= demand.step_s + 1e-12
    for stage in range(job.parallel.pipeline):
        recomputed = windows.total(stage, "hidden_s") + windows.total(stage, "exposed_s")
        assert recomputed <= demand.total(stage, "exposed_s") + 1e-12
        assert demand.total(stage, "hidden_s") == 0


@every_layout
def test_what_windows_hide_is_what_the_planner_said(layout):
    """Where windows are longer than all recomputations, or are none at all."""
    job = job_of(layout)
    for link_s in (1e-12, 10.0):
        profile = made_up_profile(job, link_s)
        plan = make_plan(job, profile)
        simulation = rehearse(plan, profile)
        if job.parallel.pipeline > job.microbatches:
            continue  # its planner counts every backward of a first stage as cool-down; one of them follows a forward
        for stage in plan.stages:
            assert simulation.total(stage.stage, "hidden_s") >= stage.predicted.hidden_recompute_s - 1e-9
            assert simulation.total(stage.stage, "exposed_s") <= stage.predicted.exposed_recompute_s + 1e-9


def closed_form_s(job, profile, plan):
    """The slowest stage, with its messages, paces all micro-batches but the first."""
    message_s, seconds = profile.link_s("p2p", profile.attention.input_bytes), []
    for stage in plan.stages:
        time, exposed_s = stage_seconds(job, profile, stage.stage), stage.predicted.exposed_recompute_s / job.microbatches
        halves = treated_halves(stage, planned_halves(stage, plan.model.sections_of), Prices(profile))
        spared_s = sum(half.spared_s(half.planned.gathered) for half in halves)
        neighbours = (stage.stage > 0) + (stage.stage < len(plan.stages) - 1)  # a message blocks both sides
        seconds.append(time.both_s + exposed_s - spared_s + neighbours * message_s)
    return (job.microbatches - 1) * max(seconds) + sum(seconds)


@pytest.mark.parametrize("layout", [LAYOUTS[name] for name in ("one rank", "tp", "tp+sp")])
@pytest.mark.parametrize("policy", ["none", "planned"])
@every_link
def test_one_stage_takes_as_long_as_the_closed_form(layout, policy, link_s):
    job = job_of(layout, policy)
    profile = made_up_profile(job, link_s)
    plan = make_plan(job, profile)
    assert plan.stages[0].predicted.step_s == pytest.approx(closed_form_s(job, profile, plan))


@every_link
def test_a_pipeline_takes_as_long_as_the_closed_form(link_s):
    """To one message in a step: they hold up both sides."""
    job = job_of(LAYOUTS["tp x pp"], "none")
    profile = made_up_profile(job, link_s)
    plan = make_plan(job, profile)
    message_s = profile.link_s("p2p", profile.attention.input_bytes)
    assert plan.stages[0].predicted.step_s == pytest.approx(closed_form_s(job, profile, plan), abs=message_s + 1e-9)


@every_layout
def test_a_budget_is_kept_in_every_moment(layout):
    job = job_of(layout)
    profile = made_up_profile(job, 1e-9)
    kept = rehearse(uniform_plan(job, "none"), profile)
    for share in (0.6, 0.8):
        budget_bytes = share * kept.memory(0).peak_bytes
        limited = job.model_copy(update={"budget": Budget(activation_mib=budget_bytes / MIB)})
        simulation = rehearse(make_plan(limited, profile), profile)
        assert all(simulation.memory(stage).peak_bytes <= budget_bytes for stage in range(job.parallel.pipeline))


def test_the_timeline_shows_every_recomputation_in_its_window():
    job = job_of({"tensor": 2, "pipeline": 2, "microbatches": 3})
    timeline = rehearse(uniform_plan(job), made_up_profile(job)).timeline()
    seen = [(span.micro_batch, span.layer, span.half, span.window) for span in timeline.ranks[0] if span.kind == "recompute"]
    assert seen[:4] == [
        (0, 2, "mlp", "pipe.recv_backward"),
        (0, 2, "attention", "bwd.mlp.0@2"),
        (0, 1, "mlp", "bwd.attention.0@2"),
        (0, 1, "attention", "bwd.mlp.0@1"),
    ]
    assert (2, 2, "mlp", "pipe.recv_backward") in seen, "cool-down"
    assert not any(span.on_demand for span in timeline.ranks[0])
    assert sum(span.on_demand for span in timeline.ranks[1]) == job.microbatches, (
        "no window comes before the last stage's last half"
    )


def test_a_profile_of_another_job_is_refused():
    with pytest.raises(PlanMismatch) as refusal:
        rehearse(uniform_plan(tiny_job(tensor=2)), made_up_profile(tiny_job(tensor=1, hidden=64)))
    assert {problem.where for problem in refusal.value.problems} >= {"profile: shape.hidden", "profile: shape.tensor"}


def test_copies_are_in_the_timeline_and_what_they_carry_leaves_the_device():
    """Five stages, so that the first one has five micro-batches in flight."""
    job = tiny_job("llama", pipeline=5, layers=5, microbatches=10).model_copy(update={"policy": "none", "offload_ratio": 0.5})
    profile = made_up_profile(job, 1e-9)
    seconds = sum(profile.half(half).forward_s for half in ("attention", "mlp")) / 50
    size = profile.attention.input_bytes
    hosted = profile.model_copy(update={"links": (*profile.links, LinkPoint(kind="host", bytes=size, seconds=seconds))})
    kept, plan = make_plan(job.model_copy(update={"offload_ratio": 0.0}), hosted), make_plan(job, hosted)
    offload = plan.stages[0].offload
    assert offload.bytes == plan.stages[0].predicted.resident_activation_bytes // 2
    assert offload.smallest_tensor_bytes < size, "or nothing of so small a layer would leave"
    assert all(stage.offload is None for stage in plan.stages[1:])
    simulation = rehearse(plan, hosted)
    spans = simulation.timeline().ranks[0]
    assert [sum(span.kind == kind for span in spans) for kind in ("offload", "reload")] == [10, 10]
    assert simulation.memory(0).peak_bytes < rehearse(kept, hosted).memory(0).peak_bytes
    assert simulation.memory(0).bytes[-1] == 0
    assert as_json(simulation, None)["stages"][0]["exposed_copy_s"] == simulation.exposed_copy_s(0)


def with_whole(plan, **whole):
    data = plan.model_dump(mode="json")
    for entry in data["stages"]:
        entry["whole"] = whole
    return Plan.model_validate(data)


@pytest.mark.parametrize("layout", [LAYOUTS["tp x pp"], *CHUNKED.values()])
def test_whole_micro_batches_recompute_nothing_and_hold_all(layout):
    """Between a plan that keeps everything and one that recomputes."""
    job = job_of(layout)
    profile = made_up_profile(job)
    usual = uniform_plan(job)
    kept, mixed, recomputed = (
        rehearse(plan, profile) for plan in (uniform_plan(job, "none"), with_whole(usual, of_every=2, first=1), usual)
    )
    for stage in range(job.parallel.pipeline):
        none, some, every = (recomputations(run, stage) for run in (kept, mixed, recomputed))
        assert none == set()
        assert some == {recompute for recompute in every if recompute[0] % 2 == 1}
        assert mixed.memory(stage).bytes[-1] == 0
        peaks = [run.memory(stage).peak_bytes for run in (recomputed, mixed, kept)]
        assert peaks == sorted(peaks)
    assert with_all(rehearse(with_whole(usual, of_every=1, first=1), profile)) == with_all(kept)


def recomputations(simulation, stage):
    spans = simulation.timeline().ranks[stage]
    return {(span.micro_batch, span.layer, span.half) for span in spans if span.kind == "recompute"}


def with_all(simulation):
    stages = range(len(simulation.executed))
    return simulation.step_s, [(simulation.memory(stage).peak_bytes, simulation.total(stage, "hidden_s")) for stage in stages]


@pytest.mark.parametrize("layout", CHUNKED.values(), ids=CHUNKED.keys())
@pytest.mark.parametrize("link_s", [1e-5, 1.0])
def test_chunks_hold_at_most_what_the_planner_said_and_hide_as_much(layout, link_s):
    job = job_of(layout)
    profile = made_up_profile(job, link_s)
    kept = rehearse(uniform_plan(job, "none"), profile)
    least = rehearse(make_plan(job, profile), profile)
    stages = range(job.parallel.pipeline)
    said_bytes = [Stages(job, profile).answer(stage).peak_bytes for stage in stages]
    assert all(least.memory(stage).peak_bytes <= said_bytes[stage] for stage in stages)
    most, floor = max(kept.memory(stage).peak_bytes for stage in stages), max(said_bytes)
    for share in (0.1, 0.5):
        budget = Budget(activation_mib=(floor + share * (most - floor) + 1) / MIB)
        decision = decide(job.model_copy(update={"budget": budget}), profile)
        simulation, plan = decision.simulation, decision.plan
        for stage in stages:
            held_bytes = simulation.memory(stage).peak_bytes
            assert held_bytes <= decision.stages[stage].peak_bytes <= budget.activation_mib * MIB
            assert simulation.memory(stage).bytes[-1] == 0
            hidden_s = sum(entry.predicted.hidden_recompute_s for entry in plan.chunks_of(stage))
            assert hidden_s == pytest.approx(simulation.total(stage, "hidden_s"), abs=1e-9)
        demand = rehearse(without_windows(plan), profile)
        assert simulation.step_s <= demand.step_s + 1e-12


def test_a_profile_of_other_experts_is_not_the_plans():
    job = catalogued_job("mixtral-8x7b", gpus=8, batch=8, parallel={"tensor": 1, "expert": 8})
    plan, profile = uniform_plan(job, "none"), analytic_profile(job)
    rehearse(plan, profile)
    some = plan.model_copy(update={"model": plan.model.model_copy(update={"moe_layers": (LayerRange(first=1, last=8),)})})
    with pytest.raises(PlanMismatch, match="layers with experts: found 1-32, needed 1-8, as in the plan"):
        rehearse(some, profile)
    with pytest.raises(ValidationError, match=r"shape\.experts and experts belong together"):
        Profile.model_validate(profile.model_dump() | {"experts": None})


def test_an_input_that_was_gathered_before_is_not_waited_for_again():
    """It was, in simulations: where the earlier gather delayed nothing, the wait that it spares was forgotten."""
    job = catalogued_job(gpus=8, batch=4, policy="planned", parallel={"tensor": 8, "pipeline": 1, "sequence_parallel": True})
    profile = analytic_profile(job)
    plans = uniform_plan(job, "none"), uniform_plan(job, gather="once")
    kept, gathered = (rehearse(plan, profile) for plan in plans)
    waits = [{span.name for span in one.timeline().ranks[0] if span.kind == "window"} for one in (kept, gathered)]
    assert "bwd.attention.1@3" in waits[0]
    assert "bwd.attention.1@3" not in waits[1]
    (stage,) = plans[1].stages
    halves = treated_halves(stage, planned_halves(stage, plans[1].model.sections_of), Prices(profile))
    spared_s = next(half.spared_s(half.planned.gathered) for half in halves if half.planned.layer == 3)
    (span,) = (span for span in kept.executed[0][1].content.spans if span.name == "bwd.attention.1@3")
    assert spared_s > 0
    assert spared_s == pytest.approx(span.end_s - span.start_s)


def test_a_plan_takes_as_long_in_every_command_if_gradients_are_reduced_in_backward() -> None:
    """The last backward of the first stage then delays no weight gradient: the job tells, no caller."""
    job = load_job(job_path("llama3-70b-h800-80g")).model_copy(update={"overlap": Overlap(gradients=True)})
    profile = analytic_profile(job)
    decided = decide(job, profile)
    jobs = decided.job, decided.job.model_copy(update={"overlap": Overlap()})
    alone, together = (rehearse(decided.plan, profile, job=each) for each in jobs)
    assert alone.step_s == decided.simulation.step_s
    last, otherwise = (simulation.executed[0][-1].content for simulation in (alone, together))
    assert (last.filled_s, last.unfilled_s) == (0, 0)
    assert min(otherwise.filled_s, otherwise.unfilled_s) > 0


def test_stages_that_reduce_by_themselves_delay_nothing_in_their_last_backward() -> None:
    """--no-align-grad-reduce: it was not read, and later stages were simulated as if they reduced after it."""
    job = load_job(job_path("llama3-70b-h800-80g")).model_copy(
        update={"overlap": Overlap(gradients=True, weight_gradient_pieces=False)}
    )
    profile = analytic_profile(job)
    decided = decide(job, profile)
    alone = decided.job.model_copy(update={"overlap": decided.job.overlap.model_copy(update={"aligned": False})})
    delayed_s = [rehearse(decided.plan, profile, job=one).executed[-1][-1].content.unfilled_s for one in (decided.job, alone)]
    assert delayed_s[0] > delayed_s[1] == 0
