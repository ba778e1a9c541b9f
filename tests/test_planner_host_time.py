"""A plan for GPUs that Python cannot keep busy: it says so, and leaves alone what need not be recomputed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron_lynx.anatomy import HALVES
from megatron_lynx.config.cluster import HostTime
from megatron_lynx.config.job import Job
from megatron_lynx.cost.host import HostReport
from megatron_lynx.estimate import estimate
from megatron_lynx.plan import dump_plan, load_plan, save_plan
from megatron_lynx.plan.explanation import explanation
from megatron_lynx.plan.plan import Plan
from megatron_lynx.planner import Decision, decide
from megatron_lynx.planner.summary import summary
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.simulator import figures
from megatron_lynx.solver.stages import Stages
from tests.config.jobs import catalogued_job
from tests.deferring import deferring
from tests.profiler.made_up import made_up_host_time, made_up_layer_host_time
from tests.uniform import uniform_plan

pytestmark = pytest.mark.slow

SMALL = {"tensor": 8, "pipeline": 1, "sequence_parallel": True}
"""Of hidden 4096 each device has an eighth: a layer's forward takes an H800 less than a millisecond."""


def small_job(host_time: HostTime | None = None, policy: str = "planned", **fields: Any) -> Job:
    layout = {"parallel": SMALL, "budget": {"activation_mib": 900.0}, **fields}
    job = catalogued_job("llama-7b", "h800-80g", gpus=8, batch=64, seq=2048, policy=policy, **layout)
    return job.model_copy(update={"cluster": job.cluster.model_copy(update={"host_time": host_time})})


def decided(job: Job) -> Decision:
    return decide(job, analytic_profile(job))


def touched(plan: Plan) -> int:
    """How many halves are recomputed, all or in part."""
    return sum(
        len(rule.layers) * bool(rule.recomputed_in(half)) for stage in plan.stages for rule in stage.rules for half in HALVES
    )


def text_of(plan: Plan) -> str:
    console = Console(width=400)
    with console.capture() as capture:
        console.print(explanation(plan))
    return capture.get()


@pytest.fixture(scope="module")
def unknown() -> Decision:
    return decided(small_job())


@pytest.fixture(scope="module")
def bound() -> Decision:
    return decided(small_job(made_up_host_time()))


def test_a_host_bound_plan_touches_fewer_halves_within_the_same_budget(unknown: Decision, bound: Decision) -> None:
    assert 0 < touched(bound.plan) < touched(unknown.plan)
    assert bound.stages[0].peak_bytes <= 900 * 2**20


def test_and_is_faster_than_the_plan_that_knew_no_host_time(unknown: Decision, bound: Decision) -> None:
    profile = analytic_profile(small_job(made_up_host_time()))
    assert bound.simulation.step_s < rehearse(unknown.plan, profile).step_s


def test_every_pass_takes_as_long_as_the_host_needs(bound: Decision) -> None:
    """32 layers, 64 micro-batches: forwards and backwards of what is kept, and of what is recomputed."""
    recomputed = touched(bound.plan)
    least_s = 64 * ((64 - recomputed) * (550 + 550) + recomputed * (600 + 750)) * 1e-6
    assert bound.simulation.total(0, "host_s") >= least_s * (1 - 1e-9)
    assert bound.simulation.step_s >= bound.simulation.total(0, "host_s") * (1 - 1e-9)


def test_host_bound_is_said_wherever_the_plan_is_shown(bound: Decision, tmp_path: Path) -> None:
    (load,) = bound.host.bound
    assert load.host_s > load.device_s > 0
    assert bound.host.lines[0].startswith("host-bound: stage 0: in a step the host needs ")
    assert summary(bound)["host_time"] == {
        "cpu": "a CPU of a test",
        "layers": "local",
        "host_bound": [{"stage": 0, "host_s": load.host_s, "device_s": load.device_s}],
    }
    save_plan(bound.plan, tmp_path / "plan.yaml")
    plan = load_plan(tmp_path / "plan.yaml")
    assert (plan.stages[0].predicted.host_s, plan.stages[0].predicted.device_s) == pytest.approx((load.host_s, load.device_s))
    assert "host-bound: the host needs" in text_of(plan)
    assert figures.as_json(bound.simulation, None)["stages"][0]["host_late_s"] > 0


def test_an_unknown_host_time_is_said_and_changes_nothing(unknown: Decision) -> None:
    assert unknown.host.lines == HostReport(None).lines
    assert "not known" in unknown.host.lines[0]
    assert "host_s" not in dump_plan(unknown.plan)
    assert "no stage is said to be host-bound" in text_of(unknown.plan)
    assert "host_s" not in json.dumps(figures.as_json(unknown.simulation, None))


@pytest.mark.parametrize("offload_ratio", [0.0, "auto"])
def test_a_fast_host_changes_no_digit(offload_ratio: float | str) -> None:
    layout = {"parallel": {"tensor": 4, "pipeline": 2, "sequence_parallel": True}, "offload_ratio": offload_ratio}
    jobs = [small_job(host_time, **layout) for host_time in (None, made_up_host_time(1e-3))]
    unknown, known = map(decided, jobs)
    assert dump_plan(known.plan) == dump_plan(unknown.plan)
    assert "Python stays ahead of the device" in known.host.lines[0]
    assert (known.simulation.step_s, known.host.bound) == (unknown.simulation.step_s, ())


def test_stock_policies_have_a_host_time_of_their_own() -> None:
    """32 layers of two halves, 64 micro-batches; there are no bubbles and no messages."""
    answers = {policy: estimate(small_job(made_up_host_time(10), policy)) for policy in ("none", "full")}
    for policy, half_us in (("none", 10_000), ("full", 15_000)):
        parts_s, host = answers[policy].step_parts_s, answers[policy].host
        assert parts_s is not None
        assert host is not None
        assert parts_s["pipeline_s"] == pytest.approx(64 * 64 * half_us * 1e-6)
        assert [load.stage for load in host.bound] == [0]
        assert answers[policy].as_json["host_time"]["host_bound"][0]["host_s"] == pytest.approx(parts_s["pipeline_s"])


@pytest.mark.parametrize(
    ("host_time", "half_us", "words"),
    [
        ({"local": 1.0, "transformer_engine": 3.0}, 3000, "Transformer Engine's layers on a CPU"),
        ({"local": 1.0}, 1000, "Megatron's own layers on a CPU, where Transformer Engine's layers were not measured"),
    ],
)
def test_layers_take_their_own_implementations_host_time(host_time: dict[str, float], half_us: float, words: str) -> None:
    """On an H100's host Transformer Engine's layers took three times what was measured of Megatron's own."""
    measured = HostTime(cpu="a CPU", **{kind: made_up_layer_host_time(times) for kind, times in host_time.items()})
    job = small_job(measured, "none")
    job = job.model_copy(update={"model": job.model.model_copy(update={"implementation": "transformer_engine"})})
    answer = estimate(job)
    assert answer.step_parts_s is not None
    assert answer.step_parts_s["pipeline_s"] == pytest.approx(64 * 64 * half_us * 1e-6)
    assert answer.host is not None
    assert answer.host.lines[-1].startswith(f"host time of {words}; ")
    assert answer.as_json["host_time"]["layers"] == max(host_time)


def test_weight_gradients_in_waits_are_issued_too() -> None:
    """Two linears a half: 20 us more in its forward, 180 us more in its backward."""
    job = small_job(made_up_host_time())
    kept = uniform_plan(job, "none")
    plans = kept, deferring(kept), deferring(kept, ["linear_qkv"])
    host_s = [rehearse(plan, analytic_profile(job)).total(0, "host_s") for plan in plans]
    assert host_s[1] - host_s[0] == pytest.approx(64 * 32 * 2 * 200e-6)
    assert host_s[2] - host_s[0] == pytest.approx(64 * 32 * 100e-6)


def test_stages_with_experts_count_what_is_known_of_them() -> None:
    """Attention halves alone: what experts take the host was not measured."""
    experts = {"count": 8, "per_token": 2, "ffn": 1024, "layers": "all"}
    job = small_job(made_up_host_time(100), "none")
    job = Job.model_validate(job.model_dump(by_alias=True) | {"model": job.model.model_dump() | {"experts": experts}})
    parts_s = estimate(job).step_parts_s
    assert parts_s is not None
    assert parts_s["pipeline_s"] == pytest.approx(64 * 32 * 100_000e-6)


def test_copies_to_the_host_are_issued_too() -> None:
    """Stage 0 has four layers of two halves; offloading takes 100 us more in each pass of a half."""
    job = small_job(made_up_host_time(), parallel={"tensor": 1, "pipeline": 8}, offload_ratio=0.5)
    profile = analytic_profile(job)
    offloading = Stages(job, profile).answer(0)
    keeping = Stages(job.model_copy(update={"offload_ratio": 0.0}), profile).answer(0)
    assert offloading.host.both_s - keeping.host.both_s == pytest.approx(4 * 2 * 200e-6)
