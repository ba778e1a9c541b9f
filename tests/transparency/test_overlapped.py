"""Plans beside overlapped exchanges of experts (`--overlap-moe-expert-parallel-comm`): Megatron's combined schedule runs a
forward and a backward in turns, node by node. What is stock's there is compared, which sums otherwise than without the flag."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import pytest

from megatron_lynx.config.experts import Opaque, gated_attention
from megatron_lynx.config.job import Job
from megatron_lynx.cost.section import Prices
from megatron_lynx.kinds.experts.planning import expert_tensors
from megatron_lynx.plan.plan import Plan
from megatron_lynx.profiler.profile import ExpertHalf, ItemProfile, Profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.rehearsal import RehearsedStage
from megatron_lynx.simulator.passes import TimedPass
from megatron_lynx.testbed.ranks import RankError, RankPool
from tests.long import long
from tests.profiler.made_up import made_up_profile
from tests.te_releases import folder_of, pools_with, python_path
from tests.tiny_jobs import tiny_job
from tests.transparency.checkpoints import checkpointed
from tests.transparency.offload_trials import bytes_at_halves
from tests.transparency.offloaded import offloading
from tests.transparency.opaque_layers import compare as compare_opaque
from tests.transparency.opaque_layers import delta_net_in
from tests.transparency.plans import plan_for, recomputable
from tests.transparency.test_every_bit import checked
from tests.transparency.test_experts import EXPERTS, SPREAD, TP2, trial_of
from tests.uniform import uniform_plan

Pools = Callable[[int], RankPool]

LAYOUTS: dict[str, dict[str, Any]] = {
    "EP2": SPREAD,
    "PP2xVPP2, EP2": {**SPREAD, "pipeline": 2, "layers_per_chunk": 1, "microbatches": 4},
    "TP2xEP2, sequence parallel": {**TP2, "expert": 2, "expert_tensor": 1},
    "CP2xEP2": {"context": 2, "context_exchange": "all_gather", "expert": 2},
    "TP2xPP2xVPP2, EP2": {**TP2, "expert": 2, "expert_tensor": 1, "pipeline": 2, "layers_per_chunk": 1, "microbatches": 4},
}


def job_of(layout: str, *, experts: dict[str, Any] | None = None, **model: Any) -> Job:
    mixture = {**EXPERTS, "overlapped": True, **(experts or {})}
    return tiny_job("gpt", **LAYOUTS[layout], experts=mixture, bias=False, dtype="bf16", **model)


def candidates_for(job: Job) -> list[Plan]:
    """Nothing recomputed; everything that can be; and with attention halves that keep their input."""
    everything = plan_for(job, lambda layer: recomputable(job), windows=False)
    return [plan_for(job, lambda layer: ()), everything, checkpointed(everything, "attention")]


def compared(pool_of: Pools, job: Job, **fields: Any) -> None:
    """All of it on demand, half by half. Nothing communicates that does not in stock but, in attention halves that keep their
    input alone, what these gather: that input with sequence parallelism, or keys and values of context-parallel ranks."""
    for outcomes in checked(pool_of, job, candidates_for(job), trial_of(canaries=True, **fields)):
        again = [Counter(outcome.planned.collectives) - Counter(outcome.stock.collectives) for outcome in outcomes]
        assert not any(Counter(outcome.stock.collectives) - Counter(outcome.planned.collectives) for outcome in outcomes)
        assert all(outcome.planned.collectives == outcome.stock.collectives for outcome in outcomes[:2]), "in kind and order"
        each = int(job.parallel.sequence_parallel) + 2 * int(job.parallel.context > 1)
        gathered = each * job.microbatches * job.model.layers // job.parallel.pipeline
        assert again == [Counter(), Counter(), Counter({"c10d::_allgather_base_": gathered} if gathered else {})]
        kept, recomputed, inputs = (outcome.planned.counts[-1].let_go_bytes for outcome in outcomes)
        assert 0 == kept < recomputed <= inputs
        assert outcomes[1].planned.overwritten > 0


IN_OTHERS = "EP2", "TP2xPP2xVPP2, EP2"
"""Whose every part is in another layout."""


@pytest.mark.parametrize("layout", [*(layout for layout in LAYOUTS if layout not in IN_OTHERS), *long(*IN_OTHERS)])
def test_every_bit(pool_of: Pools, layout: str) -> None:
    """With shared experts, and a layer that has an MLP."""
    compared(pool_of, job_of(layout, experts={"layers": ("2-4",), "shared_ffn": 32}))


@pytest.mark.parametrize("layout", ["EP2", *long("PP2xVPP2, EP2", "TP2xEP2, sequence parallel", "TP2xPP2xVPP2, EP2")])
def test_what_is_kept_may_go_to_the_host(pool_of: Pools, layout: str) -> None:
    """With what experts keep and without; every copy is late, and what nobody may read any more is overwritten. On one stage half
    by half, beside the forward of the next micro-batch, which goes out meanwhile."""
    job = job_of(layout, experts={"layers": ("2-4",), "shared_ffn": 32})
    kept, everything, inputs = candidates_for(job)
    slow, fast = (None, None) if job.chunks > 1 else (1_000, 1 << 20)
    candidates = [
        offloading(kept, 8_000, pace=slow),
        offloading(kept, 1 << 20, experts=True, pace=fast),
        offloading(everything, 1 << 20, experts=True, pace=slow),
        offloading(inputs, 1 << 20, experts=True, pace=fast),
    ]
    for outcomes in checked(pool_of, job, candidates, trial_of(tampered=True)):
        last = [outcome.planned.counts[-1] for outcome in outcomes]
        assert all(0 < counts.offloaded_bytes == counts.reloaded_bytes for counts in last)


def test_device_bytes_half_by_half_are_what_the_planner_says(pool_of: Pools) -> None:
    """Of both passes of a pair, before each half's forward and backward. Every expert gets every token; beside what a plan counts
    small tensors leave, and some stay; and gloo's own thread may still hold what an exchange brought."""
    job = job_of("EP2", experts={"layers": "all", "per_token": 4}, microbatches=3)
    profile, kept, size = profile_of(job), plan_for(job, lambda layer: ()), 1 << 20
    smallest = profile.attention.input_bytes // 4
    fast, slow = (offloading(kept, size, smallest=smallest, pace=pace, experts=True) for pace in (size, 2_000))
    plans = [offloading(kept, 1, smallest=10**9, pace=1, experts=True), fast, slow]
    rows_bytes = 2 * 4 * LayerShape.of(job).input_bytes
    for stayed, *found in pool_of(job.gpus).run(bytes_at_halves, job, plans):
        for plan, own in zip(plans[1:], found, strict=True):
            gone, said = [before - now for before, now in zip(stayed, own, strict=True)], gone_in_pairs(plan, profile)
            off = max(abs(one - other) for one, other in zip(gone, said, strict=True))
            assert off <= 0.08 * max(said) + rows_bytes, (gone, said)


def profile_of(job: Job) -> Profile:
    """Nobody measured it; bytes are those of shapes."""
    shape, section = LayerShape.of(job), job.model.kind_sections(experts=True)[1]
    item = ItemProfile(forward_s=1e-6, backward_s=1e-6, saved_bytes=0, output_bytes=0, flops=0)
    items = dict.fromkeys(section.names, item)
    experts = ExpertHalf(input_bytes=shape.input_bytes, items=items, tensors=expert_tensors(shape))
    return made_up_profile(job, experts=experts)


def gone_in_pairs(plan: Plan, profile: Profile) -> list[int]:
    """What is on the host of one forward alone, of each pair and of one backward alone, in the order of Megatron's nodes."""
    (chunk,) = RehearsedStage(plan, 0, Prices(profile, {})).passes()
    assert chunk.at_once is not None
    made, back = (
        [kept - now for kept, now in zip(*(at_halves(each.one(kind, "steady")) for each in (chunk, chunk.at_once)), strict=True)]
        for kind in ("F", "B")
    )
    everything = -back[-1]
    made, left = [*made, everything], [everything, *(everything + size for size in back)]
    pair = [
        gone
        for at in range(0, len(back), 2)
        for gone in (made[at] + left[at], made[at + 1] + left[at + 1], made[at + 1] + left[at + 1], made[at + 2] + left[at + 2])
    ]
    return [*made[:-1], *pair * (plan.batch.microbatches - 1), *left[1:]]


def at_halves(one: TimedPass) -> list[int]:
    """What a pass has taken when each of its halves begins."""
    times_s, taken = [at_s for at_s, _ in one.memory], [0, *accumulate(change for _, change in one.memory)]
    begins_s = sorted(span.start_s for span in one.spans if span.kind in ("forward", "backward"))
    return [taken[bisect_right(times_s, begin_s)] for begin_s in begins_s]


def test_without_a_pace_nothing_of_one_stage_goes_to_the_host(pool_of: Pools) -> None:
    """It would come back at once: the backward of each micro-batch begins when its forward is over."""
    plan = offloading(plan_for(job_of("EP2"), lambda layer: ()), 1 << 20, experts=True)
    for outcomes in checked(pool_of, job_of("EP2"), [plan], trial_of(steps=1)):
        assert outcomes[0].planned.counts[-1].offloaded_bytes == 0


@pytest.fixture(scope="module")
def newest_pool_of() -> Iterator[Pools]:
    yield from pools_with("2.17", core="0.19", NVTE_ALLOW_NONDETERMINISTIC_ALGO="0")


@pytest.mark.parametrize(
    ("layout", "delayed"), [("EP2", False), *long(("TP2xEP2, sequence parallel", False), ("PP2xVPP2, EP2", True))]
)
def test_opaque_attention_is_kept_whole_in_its_node(newest_pool_of: Pools, layout: str, delayed: bool) -> None:
    """A gated attention, and one of a fork; gated delta nets, experts and MLPs recompute, or go to the host."""
    gated = Opaque.model_validate({**gated_attention(32, 2, queries=32, keys=32, seq=16), "layers": (2,)})
    own = gated.model_copy(update={"kind": "own_attention", "layers": (4,)})
    implementation = "transformer_engine" if delayed else "local"
    experts = {"layers": ("2-4",), "shared_ffn": 32, "delayed": delayed}
    job = job_of(
        layout, experts=experts, opaque=(*delta_net_in([1, 3]), gated, own), implementation=implementation, deterministic=True
    )
    kept, everything = uniform_plan(job, "none"), uniform_plan(job)
    pace = None if job.chunks > 1 else 1_000
    candidates = [kept, everything, offloading(everything, 8_000, pace=pace, experts=True)]
    trial = trial_of(canaries=True, model={"attention_output_gate": True})
    for outcomes in newest_pool_of(job.gpus).run(compare_opaque, job, candidates, trial):
        assert [(outcome.differing, outcome.planned.frames_left) for outcome in outcomes] == [([], 0)] * len(candidates)
        assert all(outcome.planned.collectives == outcome.stock.collectives for outcome in outcomes)
        last = [outcome.planned.counts[-1] for outcome in outcomes]
        assert last[0].let_go_bytes == 0 < last[1].let_go_bytes
        assert 0 < last[2].offloaded_bytes == last[2].reloaded_bytes
        assert outcomes[1].planned.overwritten > 0


def test_gated_delta_nets_of_0_16_have_no_nodes(pool_of: Pools) -> None:
    """In stock Megatron, as `stock.legality.fails` says of it. From 0.17 on they have."""
    with pytest.raises(RankError, match="'GatedDeltaNet' object has no attribute 'backward_dw'"):
        pool_of(2).run(compare_opaque, job_of("EP2", opaque=delta_net_in([1, 3])), [], trial_of())


@pytest.fixture(scope="module")
def te_pool_of() -> Iterator[Pools]:
    yield from pools_with("2.17")


def test_multi_token_prediction(pool_of: Pools) -> None:
    """Its layer keeps everything, in nodes of its own."""
    compared(pool_of, job_of("PP2xVPP2, EP2", experts={"shared_ffn": 32}, mtp=1))


@pytest.mark.parametrize("layout", ["TP2xEP2, sequence parallel", *long("PP2xVPP2, EP2", *IN_OTHERS)])
def test_delayed_weight_gradients(te_pool_of: Pools, layout: str) -> None:
    """Of Transformer Engine's linears, which keep what they need until Megatron asks for them: what was recomputed, by then."""
    compared(te_pool_of, job_of(layout, implementation="transformer_engine", experts={"shared_ffn": 32, "delayed": True}))


@pytest.mark.parametrize("release", long("0.17", "0.18", "0.19"))
def test_other_releases(release: str) -> None:
    with RankPool(2, env={"PYTHONPATH": python_path(folder_of("MEGATRON_CORE", release, "megatron/core"))}) as pool:
        compared(lambda ranks: pool, job_of("EP2", experts={"shared_ffn": 32}))


def test_plans_for_the_other_schedule_are_refused(pool_of: Pools) -> None:
    job = job_of("EP2")
    usual = tiny_job("gpt", **SPREAD, experts=EXPERTS, bias=False, dtype="bf16")
    for planned, found in ((usual, "found False, needed True"), (job, "found True, needed False")):
        plan = plan_for(planned, lambda layer: ())
        with pytest.raises(RankError, match=f"plan: model.moe_overlapped: {found}"):
            checked(pool_of, job if planned is usual else usual, [plan])


def test_in_a_pipeline_no_micro_batch_goes_half_by_half() -> None:
    plan = plan_for(job_of("PP2xVPP2, EP2"), lambda layer: (), windows=False)
    with pytest.raises(ValueError, match=r"offload.pace_bytes is given, needed none"):
        offloading(plan, 8_000, pace=1_000)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"recompute": ["core_attention", "pre_mlp_layernorm"]},
            "found pre_mlp_layernorm recomputed in layers of experts, needed none but experts_fc1",
        ),
        ({"checkpoint": "layer", "keep": [], "recompute": []}, "checkpoint is layer, needed attention or none"),
        ({"windows": {"attention": "pipe.recv_backward"}}, "found pipe.recv_backward, needed on_demand"),
    ],
)
def test_what_other_nodes_run_is_not_recomputed(change: dict[str, Any], problem: str) -> None:
    raw = plan_for(job_of("EP2"), lambda layer: ["core_attention"], windows=False).model_dump(mode="json", exclude_defaults=True)
    rule = raw["stages"][0]["rules"][0]
    rule["keep"] = [] if "checkpoint" in change else [item for item in rule["keep"] if item not in change.get("recompute", ())]
    with pytest.raises(ValueError, match=problem):
        Plan.model_validate(
            {**raw, "stages": [{**raw["stages"][0], "rules": [{**rule, **change}, *raw["stages"][0]["rules"][1:]]}]}
        )
