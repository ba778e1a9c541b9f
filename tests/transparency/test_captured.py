"""Plans beside captured graphs (`--cuda-graph-impl transformer_engine`): what is captured is kept whole, the rest is planned, and
every bit is that of stock with the same graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_lynx.anatomy import DENSE
from megatron_lynx.apply.live_run import refused_graphs
from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan
from megatron_lynx.testbed.ranks import RankError, RankPool
from tests.instruments.graphs import Tracker
from tests.long import long
from tests.te_releases import pool_with, pools_with
from tests.tiny_jobs import tiny_job
from tests.transparency.capturing import Captured, capturing
from tests.transparency.offloaded import offloading
from tests.transparency.plans import plan_for, recomputable
from tests.transparency.test_every_bit import LAYOUTS, checked
from tests.transparency.trials import Trial
from tests.uniform import uniform_plan

Pools = Callable[[int], RankPool]


@pytest.fixture(scope="module")
def te_pool_of() -> Iterator[Pools]:
    yield from pools_with("2.17")


def trial_of(**fields: Any) -> Trial:
    """One step before the capture, two with graphs."""
    return Trial(**{"steps": 3, "captured": Captured(), "training": {"ddp": True}, **fields})


def job_of(layout: str, captured: tuple[str, ...], **model: Any) -> Job:
    fields = {"dtype": "bf16", "implementation": "transformer_engine", "captured": captured, **model}
    return tiny_job("gpt", **LAYOUTS[layout], **fields)


def free(job: Job) -> list[str]:
    """What may be recomputed beside the graphs."""
    sections = {section for layer in range(1, job.model.layers + 1) for section in job.model.sections(layer)}
    names = {name for section in sections for name in section.recomputable}
    return [item for item in recomputable(job) if item in names]


def candidates_for(job: Job) -> list[Plan]:
    """Nothing recomputed; all that is in no graph, on demand; the same in the windows that are left, under sequence parallelism
    from inputs that are gathered once."""
    windows = [uniform_plan(job), *([uniform_plan(job, gather="once")] if job.parallel.sequence_parallel else [])]
    return [plan_for(job, lambda layer: ()), plan_for(job, lambda layer: free(job), windows=False), *windows]


@pytest.mark.parametrize(
    ("layout", "captured"),
    [("one rank", "mlp"), ("PP2", "attn"), *long(("one rank", "attn"), ("TP2+SP", "mlp"), ("TP2+SP", "attn"), ("PP2", "mlp"))],
)
def test_the_other_half_is_planned(te_pool_of: Pools, layout: str, captured: str) -> None:
    job = job_of(layout, (captured,))
    for outcomes in checked(te_pool_of, job, candidates_for(job), trial_of()):
        for outcome in outcomes:
            assert outcome.planned.graph_replays == outcome.stock.graph_replays > 0
        assert outcomes[0].planned.counts[-1].let_go_bytes == 0 < outcomes[1].planned.counts[-1].let_go_bytes


EXPERTS: dict[str, Any] = {"count": 4, "per_token": 2, "ffn": 64, "shared_ffn": 32}
SPREAD = {
    "EP2": {"expert": 2, "replicas": 2},
    "PP2, EP2": {"expert": 2, "replicas": 2, "pipeline": 2, "microbatches": 4},
}
ROUTED = (("moe_router",), ("attn", "moe_router", "moe_preprocess"))


@pytest.mark.parametrize(
    ("layout", "captured"),
    [("EP2", ROUTED[1]), *long(("EP2", ROUTED[0]), ("PP2, EP2", ROUTED[0]), ("PP2, EP2", ROUTED[1]))],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_experts_compute_is_planned_behind_a_captured_router(
    te_pool_of: Pools, layout: str, captured: tuple[str, ...]
) -> None:
    """Norm, router and shared experts are in the graph; what is between dispatch and combine runs again, beside attention halves
    that are not captured."""
    fields = {"dtype": "bf16", "implementation": "transformer_engine", "captured": captured, "bias": False}
    job = tiny_job("gpt", **SPREAD[layout], experts=EXPERTS, **fields)
    experts = [item for item in ("experts_fc1", "experts_activation") if item in free_of_experts(job)]
    candidates = [plan_for(job, lambda layer: ()), plan_for(job, lambda layer: [*experts, *free(job)], windows=False)]
    for outcomes in checked(te_pool_of, job, candidates, trial_of()):
        for outcome in outcomes:
            assert outcome.planned.graph_replays == outcome.stock.graph_replays > 0
        assert outcomes[0].planned.counts[-1].let_go_bytes == 0 < outcomes[1].planned.counts[-1].let_go_bytes


def test_what_is_kept_beside_a_captured_router_may_go_to_the_host(te_pool_of: Pools) -> None:
    """Every copy is late, and what nobody may read any more is overwritten: graphs read none of it."""
    fields = {"dtype": "bf16", "implementation": "transformer_engine", "captured": ("moe_router",), "bias": False}
    job = tiny_job("gpt", **SPREAD["PP2, EP2"], experts=EXPERTS, **fields)
    kept = plan_for(job, lambda layer: ())
    found = checked(te_pool_of, job, [offloading(kept, 1 << 20, experts=True)], trial_of(tampered=True))
    counts = [outcome.planned.counts[-1] for [outcome] in found]
    assert all(each.offloaded_bytes == each.reloaded_bytes for each in counts)
    assert any(each.offloaded_bytes > 0 for each in counts)


def free_of_experts(job: Job) -> set[str]:
    return {item for section in job.model.sections(1) for item in section.recomputable}


@pytest.mark.parametrize("tracker", ["te", "inference"])
def test_other_trackers_of_random_numbers(te_pool_of: Pools, tracker: Tracker) -> None:
    """Transformer Engine's has generators as states, which graphs hold on to: a recomputation sets what is in them, and leaves
    them in place. Inference's has none, and all draw from the device's generator."""
    job = job_of("TP2+SP", ("attn",))
    checked(te_pool_of, job, candidates_for(job)[1:2], trial_of(captured=Captured(tracker=tracker)))


def test_capture_before_the_first_step(te_pool_of: Pools) -> None:
    """`--cuda-graph-warmup-steps 0`: halves are recorded first on what a graph made. What was let go is overwritten."""
    job = job_of("PP2", ("attn",))
    [[outcome, _], _] = checked(te_pool_of, job, candidates_for(job)[1:], trial_of(captured=Captured(0), canaries=True))
    assert outcome.planned.overwritten > 0


def test_a_hook_in_a_graph_is_passed_at_the_capture_alone(te_pool_of: Pools) -> None:
    """What the instrument is for: a replay runs none of the model's Python, on the memory of the capture."""
    [seen] = te_pool_of(1).run(calls_of_a_hook, job_of("one rank", ("attn",)))
    assert seen == {"in the graph": 0, "beside it": 2, "replays": 8}


def test_no_hook_is_on_a_captured_half(te_pool_of: Pools) -> None:
    """Nor on its sites: what it is called with while graphs are captured is no micro-batch's."""
    job = job_of("one rank", ("attn",))
    [held] = te_pool_of(1).run(held_by, job, plan_for(job, lambda layer: free(job), windows=False))
    of_first = [where for where in held if where.startswith("layer 1.")]
    assert "layer 1._forward_mlp" in of_first
    assert not any(name in where for where in of_first for name in ("attention", "linear_qkv", "linear_proj"))


@pytest.mark.parametrize("core", ["0.19", *long(None)])
def test_local_graphs_are_of_whole_layers_or_of_nothing(core: str | None) -> None:
    """Which modules of a GPT model with experts `--cuda-graph-impl local` captures: no module named, attention, the router."""
    fields = {"dtype": "bf16", "implementation": "transformer_engine", "bias": False, "microbatches": 1}
    job = tiny_job("gpt", **fields, experts=EXPERTS)
    with pool_with("2.17", 1, core) as pool:
        [whole], [attention], [router] = (pool.run(called_as_graphs, job, named) for named in ((), ("attn",), ROUTED[1][1:]))
    assert whole == attention == ["TransformerLayer"] * job.model.layers
    assert router == []


def test_a_plan_beside_local_graphs_that_capture_nothing(te_pool_of: Pools) -> None:
    """Everything runs as ever: a plan that states no graphs is the one for such a launch."""
    fields = {"dtype": "bf16", "implementation": "transformer_engine", "bias": False}
    job = tiny_job("gpt", **SPREAD["EP2"], experts=EXPERTS, **fields)
    local = {"cuda_graph_impl": "local", "cuda_graph_scope": ["moe_router", "moe_preprocess"], "moe_grouped_gemm": True}
    checked(te_pool_of, job, [uniform_plan(job)], trial_of(captured=Captured(None), model=local))


def called_as_graphs(rank: int, job: Job, captured: tuple[str, ...]) -> list[str]:
    """The classes whose calls go to a manager of graphs, in a forward of the model."""
    from megatron.core.transformer.cuda_graphs import CudaGraphManager

    from megatron_lynx.testbed.groups import seed_random_numbers
    from megatron_lynx.testbed.tiny_models import MODULES
    from megatron_lynx.testbed.training import synthetic_batches
    from tests.instruments.groups import initialise
    from tests.instruments.tiny_models import build_model
    from tests.instruments.training import Training

    initialise(job)
    called, code = [], CudaGraphManager.__call__

    def run(self: Any, module: Any, args: Any, kwargs: Any, **more: Any) -> Any:
        called.append(type(module).__name__)
        return module.forward(*args, **kwargs)

    CudaGraphManager.__call__ = run
    try:
        with capturing(job, Captured()):
            seed_random_numbers(7)
            local = {"cuda_graph_impl": "local", MODULES: list(captured)}
            Training(job, build_model(job, **local), ddp=True).step(synthetic_batches(job, 0))
    finally:
        CudaGraphManager.__call__ = code
    return called


def held_by(rank: int, job: Job, plan: Plan) -> list[str]:
    """The functions that an installation holds."""
    from megatron_lynx.apply.installation import install
    from megatron_lynx.testbed.groups import seed_random_numbers
    from tests.instruments.groups import initialise
    from tests.instruments.tiny_models import build_model
    from tests.instruments.training import Training

    initialise(job)
    with capturing(job, Captured()):
        seed_random_numbers(7)
        with install(Training(job, build_model(job), ddp=True).chunks, plan) as installation:
            return [hook.where for hook in installation.hooks]


def calls_of_a_hook(rank: int, job: Job) -> dict[str, int]:
    """How often `linear_qkv` and `linear_fc1` of the first layer are called in a step of two micro-batches with graphs."""
    from megatron_lynx.testbed.groups import seed_random_numbers
    from megatron_lynx.testbed.training import synthetic_batches
    from tests.instruments.groups import initialise
    from tests.instruments.tiny_models import build_model
    from tests.instruments.training import Training

    initialise(job)
    calls = {"in the graph": 0, "beside it": 0}
    with capturing(job, Captured()) as graphs:
        seed_random_numbers(7)
        training = Training(job, build_model(job), ddp=True)
        layer = training.chunks[0].module.module.decoder.layers[0]
        graphs.capture(training)
        for name, module in (("in the graph", layer.self_attention.linear_qkv), ("beside it", layer.mlp.linear_fc1)):
            module.register_forward_hook(lambda *_, name=name: calls.update({name: calls[name] + 1}))
        training.step(synthetic_batches(job, 0))
    return {**calls, "replays": graphs.replays}


@pytest.mark.parametrize(
    ("planned", "live", "found"),
    [
        ((), ("attn",), r"plan: model.captured: found \(\), needed \('attn',\)"),
        (("attn",), (), r"plan: model.captured: found \('attn',\), needed \(\)"),
        (("attn",), ("mlp",), r"plan: model.captured: found \('attn',\), needed \('mlp',\)"),
    ],
)
def test_a_plan_for_other_graphs_is_refused(
    te_pool_of: Pools, planned: tuple[str, ...], live: tuple[str, ...], found: str
) -> None:
    plan = plan_for(job_of("one rank", planned), lambda layer: ())
    with pytest.raises(RankError, match=found):
        checked(te_pool_of, job_of("one rank", live), [plan], trial_of(captured=Captured() if live else None))


@pytest.mark.parametrize(
    ("implementation", "modules", "lost"),
    [
        ("local", ["attn"], "it captures layers whole"),
        ("local", ["attn", "moe_router"], "it captures layers whole"),
        ("full_iteration", [], "forward and backward are one graph"),
        ("local", ["full_iteration"], "forward and backward are one graph"),
        ("transformer_engine", [], "without modules whole layers are captured"),
        ("transformer_engine", ["attn", "moe"], "exchanges of experts are in its graph"),
    ],
)
def test_captures_that_leave_nothing_are_refused(implementation: str, modules: list[str], lost: str) -> None:
    """With what would be lost, and the nearest launch."""
    [problem] = refused_graphs(SimpleNamespace(cuda_graph_impl=implementation, cuda_graph_modules=modules))
    assert problem.needed.startswith("none under a plan, or transformer_engine with --cuda-graph-modules")
    assert lost in problem.todo


def test_what_local_graphs_capture_of_hybrid_stacks_alone_is_refused_there() -> None:
    live = {"cuda_graph_impl": "local", "cuda_graph_modules": ["moe_router", "moe_preprocess"]}
    assert list(refused_graphs(SimpleNamespace(**live))) == []
    [problem] = refused_graphs(SimpleNamespace(**live, is_hybrid_model=True))
    assert problem.finding == "local"


@pytest.mark.parametrize(
    ("captured", "change", "problem"),
    [
        (
            ("attn",),
            {"recompute": ["core_attention"]},
            "found core_attention recomputed or deferred, needed the attention half kept",
        ),
        (("attn",), {"checkpoint": "layer"}, "checkpoint is layer, needed one half or none"),
        (("mlp",), {"recompute": ["core_attention"], "windows": {"attention": "bwd.mlp.0"}}, "is no window of this stage"),
        (("mlp",), {"checkpoint": "mlp"}, "checkpoint is mlp, needed the other half or none"),
        (("mlp",), {"weight_gradients": {"linear_fc2": ["bwd.attention.0"]}}, "found linear_fc2 recomputed or deferred"),
    ],
)
def test_what_is_in_a_graph_is_kept_and_hides_nothing(captured: tuple[str, ...], change: dict[str, Any], problem: str) -> None:
    job = job_of("TP2+SP", captured)
    raw = plan_for(job, lambda layer: ()).model_dump(mode="json", exclude_defaults=True)
    [rule, *rest] = raw["stages"][0]["rules"]
    halves = {"layer": tuple(DENSE), "attention": ("attention",), "mlp": ("mlp",)}.get(change.get("checkpoint", ""), ())
    gone = {*change.get("recompute", ()), *(name for half in halves for name in DENSE[half].names)}
    rule = {**rule, "keep": [item for item in rule["keep"] if item not in gone], **change}
    deferring = {"weight_gradients": {"bytes": 1 << 20}} if "weight_gradients" in change else {}
    stage = {**raw["stages"][0], "rules": [rule, *rest], **deferring}
    with pytest.raises(ValueError, match=problem):
        Plan.model_validate({**raw, "stages": [stage]})
