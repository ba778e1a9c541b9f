"""The fastest stock setting within given bytes: the search finds what trying all of them finds, and nothing above the bytes."""

from __future__ import annotations

import pickle

import pytest

from megatron_lynx.config.job import Job
from megatron_lynx.cost.step import StepRange
from megatron_lynx.cost.update import update_s
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.stock import FULL, NONE, StockSetting, priced
from megatron_lynx.stock.legality import Facts, objections, offered
from megatron_lynx.stock.rival import SimulatedRow, families, fastest, module_sets, rivals, side_by_side, verdict
from tests.config.jobs import catalogued_job

EXPERTS = {"count": 8, "per_token": 2, "ffn": 14336}


def job_of(**changes) -> Job:
    """Eight wide layers of Transformer Engine on H800s, in two stages."""
    model = {"layers": 8, "implementation": "transformer_engine"} | changes.pop("model", {})
    layout = {"tensor": 4, "pipeline": 2, "sequence_parallel": True} | changes.pop("parallel", {})
    data = catalogued_job(parallel={}, **changes).model_dump(by_alias=True)
    return Job.model_validate({**data, "model": {**data["model"], **model}, "parallel": layout})


LAYOUTS = {
    "pipeline": {},
    "one stage": {"parallel": {"pipeline": 1, "tensor": 8}, "gpus": 8},
    "interleaved": {"parallel": {"layers_per_chunk": 2}},
    "local": {"model": {"implementation": "local", "attention": "unfused"}},
}


@pytest.fixture(params=LAYOUTS)
def job(request) -> Job:
    return job_of(**LAYOUTS[request.param])


def test_a_price_comes_back_from_another_process(job):
    """With its figures, and without the passes that they came from: advise prices stock in a process of its own."""
    price = priced(job, analytic_profile(job), FULL)
    figures = price.step, price.most_bytes
    again = pickle.loads(pickle.dumps(price))
    assert (again.step, again.most_bytes) == figures
    assert again == price


def test_the_fastest_that_fits_is_found(job):
    profile = analytic_profile(job)
    every = [priced(job, profile, setting) for family in families(job) for setting in family]
    most, least = (price(each.most_bytes for each in every) for price in (max, min))
    for share in (0.0, 0.1, 0.3, 0.5, 0.8):
        budget = int(least + share * (most - least))
        best = fastest(rivals(job, profile, budget))
        fits = [price for price in every if price.most_bytes <= budget]
        assert best.most_bytes <= budget
        assert best.step_s == pytest.approx(min(price.step_s for price in fits), rel=1e-3)
    assert fastest(rivals(job, profile, least - 1)) is None
    assert fastest(rivals(job, profile, most)).setting == NONE


def test_nothing_above_the_bytes_or_not_legal_is_offered(job):
    profile, facts = analytic_profile(job), Facts.of(job)
    budget = priced(job, profile, StockSetting(method="block", layers=1)).most_bytes
    found = list(rivals(job, profile, budget))
    assert found
    assert all(price.most_bytes <= budget for price in found)
    assert all(offered(price.setting, facts) for price in found)


def test_older_releases_offload_all_layers_or_nothing():
    job = job_of()
    settings = {release: [each for family in families(job, release) for each in family] for release in ("0.15", "0.17", "0.19")}
    for release, own in settings.items():
        assert not [each for each in own if [*objections(each, Facts.of(job, release), "config")]]
    assert not any(each.offload for each in settings["0.15"])
    assert {each.fraction for each in settings["0.17"]} == {1.0}
    assert len({each.fraction for each in settings["0.19"]}) == job.partition[0]


def test_sets_that_make_no_difference_are_left_out():
    """Norms of Transformer Engine's dense layers are inside linears; local layers offload nothing."""
    te = list(module_sets(job_of()))
    names = {name for setting in te for name in (*setting.recompute, *setting.offload)}
    assert names == {"core_attn", "mlp", "qkv_linear", "attn_proj"}
    assert not any("core_attn" in setting.recompute and "core_attn" in setting.offload for setting in te)
    local = list(module_sets(job_of(**LAYOUTS["local"])))
    assert {name for setting in local for name in setting.recompute} == {"core_attn", "layernorm", "mlp"}
    assert not any(setting.offload for setting in local)


def test_experts_are_recomputed_whole_or_in_parts():
    job = job_of(model={"experts": EXPERTS}, parallel={"expert": 4, "expert_tensor": 1})
    profile = analytic_profile(job)
    sets = {setting.recompute for setting in module_sets(job)}
    assert {("moe",), ("moe_act",), ("layernorm", "moe_act")} <= sets
    assert not any({"moe", "moe_act"} <= set(each) for each in sets), "one is inside the other"
    none, act, moe = (priced(job, profile, StockSetting(recompute=each)) for each in ((), ("moe_act",), ("moe",)))
    assert none.most_bytes > act.most_bytes > moe.most_bytes
    assert none.step_s < act.step_s < moe.step_s


def test_a_slow_host_link_is_paid_for():
    """What copies cannot hide is in the step, and what lags behind is on the device."""
    job = job_of(**LAYOUTS["one stage"])
    slow = Job.model_validate(_with_host_link(job, 1.0))
    setting = StockSetting(offload=("core_attn", "attn_proj"))
    fast, late = (priced(each, analytic_profile(each), setting) for each in (job, slow))
    plain = priced(job, analytic_profile(job), NONE)
    assert fast.step_s == pytest.approx(plain.step_s)
    assert late.step_s > 1.2 * fast.step_s
    assert fast.most_bytes < late.most_bytes <= plain.most_bytes + fast.host_bytes


def _with_host_link(job: Job, gb_per_s: float) -> dict:
    data = job.model_dump(by_alias=True)
    data["cluster"]["pcie"]["gb_per_s"] = gb_per_s
    return data


def test_rows_are_against_the_fastest_that_fits():
    job = job_of()
    profile = analytic_profile(job)
    budget = priced(job, profile, StockSetting(recompute=("mlp",))).most_bytes
    ours = SimulatedRow("ours", StepRange.known(0.9 * priced(job, profile, NONE).step_s), budget - 1, ours=True)
    rows = side_by_side(job, profile, ours, rivals(job, profile, budget))
    assert [row.setting for row in rows[:2]] == ["stock none", "stock full"]
    assert rows[-1].ours
    assert all(row.device_bytes <= budget for row in rows[2:])
    strongest = min(rows[1:-1], key=lambda row: row.step.expected_s if row.device_bytes <= budget else float("inf"))
    assert strongest.setting in verdict(rows, budget, experts=False)
    assert all(flag in verdict(rows, budget, experts=False) for flag in strongest.flags)
    assert fastest(rivals(job, profile, budget)).step_s + update_s(job, profile) == pytest.approx(strongest.step.expected_s)


@pytest.mark.parametrize(
    ("share", "experts", "said"), [(0.985, False, True), (0.97, False, False), (0.98, True, True), (1, True, False)]
)
def test_a_comparison_says_that_its_difference_is_within_the_error_of_ratios(share: float, experts: bool, said: bool) -> None:
    rows = [
        SimulatedRow("stock none", StepRange.known(10.0), 5),
        SimulatedRow("ours", StepRange.known(share * 10.0), 4, ours=True),
    ]
    assert ("within the error of such ratios" in verdict(rows, 5, experts=experts)) is said
