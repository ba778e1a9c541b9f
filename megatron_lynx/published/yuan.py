"""Yuan et al. (USENIX ATC '24): memory at every offload ratio, the smallest ratio of every run, throughput, utilisation.

Calibrated on four of these runs: matrix efficiency on the throughput of 128 and 256 GPUs (H800) and of Llama-7B `ours` (A800);
PCIe efficiency on the choice of checkpointing at 80 and 128 GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from math import ceil, inf
from typing import Any

from megatron_lynx.config import Job
from megatron_lynx.cost.budget import most_beside_layers
from megatron_lynx.cost.parameters import mfu
from megatron_lynx.cost.stage_memory import parts_beside_layers
from megatron_lynx.planner import fitting
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.published.row import Row, Step, catalogued_job, stock_step_s
from megatron_lynx.solver.answer import StageAnswer
from megatron_lynx.solver.stages import CHUNKS_NOT_OFFLOADED, Stages
from megatron_lynx.stock import NONE, OF_POLICY
from megatron_lynx.stock.price import least_bytes
from megatron_lynx.units import GIB

SOURCE = "Yuan et al., ATC '24"
POLICIES = {"no": "none", "ours": "balanced", "full": "full"}
CLUSTERS = {"A800": "a800-80g", "H800": "h800-80g"}
BEFORE_FUSED_SWIGLU = {"fusions": ["bias_dropout", "rope", "masked_softmax"], "glu_offset": False}
"""Their fork of Megatron-LM of 2023 saves SiLU separately (their 8H/h), and has no offset."""
REST_BYTES = 1_200_000_000
"""Their measured memory besides parameters, gradients, optimizer, activations and copies. Their planner reserved it, so their
ratios are recomputed with it. Our model counts 0.9e9 of it, by moment; each ratio of figure 7 also has a row without the reserve.
"""
BUDGET = {"memory_gib": 64.6}
"""69.4e9 B of their 80 GB: the 68.2e9 B of their plans, and the rest."""
CALIBRATING_GPUS, CALIBRATING_DEMO = (128, 256), ("ours", "A800")
"""Runs of figure 9, and of the demo, whose throughput calibrated `matmul.efficiency` of their cluster."""


def rows(figures: Mapping[str, Any]) -> Iterator[Row]:
    yield from _memory(figures["figure7_max_memory_allocated_bytes"])
    yield from _offload_ratios(figures["figure9"])
    yield _choices(figures["figure9"])
    yield from _throughput(figures["figure9"])
    yield from _utilisation(figures["demo_7b"])
    yield from _demo_memory(figures["demo_7b"])
    yield from _demo_throughput(figures["demo_7b"])


def job_of(run: Mapping[str, Any], cluster: str = "h800-80g", **fields: Any) -> Job:
    """A run by their keys: `model`, `seq`, `n_gpus`, `B` and the letters of the layout."""
    layout = {"tensor": run["t"], "context": run["c"], "pipeline": run["p"], "layers_per_chunk": run["l"]}
    return catalogued_job(
        run["model"].lower(),
        cluster,
        gpus=run["n_gpus"],
        parallel={**layout, "sequence_parallel": run["t"] > 1, "distributed_optimizer": True},
        batch={"micro": 1, "global": run["B"]},
        model={**BEFORE_FUSED_SWIGLU, "seq": run["seq"]},
        policy=POLICIES[run["ckpt"]],
        budget=BUDGET,
        **fields,
    )


def _memory(figure: Mapping[str, Any]) -> Iterator[Row]:
    job = job_of({**figure["config"], "ckpt": "ours"})
    for ratio, published in figure["ckpt_ours"].items():
        computed = max(named - float(ratio) * spared for named, spared in _named_bytes(job)) + REST_BYTES
        yield Row(SOURCE, f"figure 7: memory, offload ratio {ratio}", published, computed, "B", bound=1.5)
        answers = _answers(job, float(ratio))
        counted = max(most_beside_layers(job, answer.stage).total + answer.peak_bytes for answer in answers)
        yield Row(SOURCE, f"figure 7: memory, offload ratio {ratio}, all of it counted", published, counted, "B", bound=4.0)


def _answers(job: Job, offload_ratio: float = 0.0) -> list[StageAnswer]:
    """All stages at this ratio, whether they fit or not."""
    stages = Stages(endless(job, offload_ratio), analytic_profile(job))
    return [stages.answer(stage) for stage in range(job.parallel.pipeline)]


def endless(job: Job, offload_ratio: float = 0.0) -> Job:
    """Return the job with more memory than any device has."""
    budget = job.budget.model_copy(update={"memory_gib": 1e6})
    return job.model_copy(update={"budget": budget, "offload_ratio": offload_ratio})


def _named_bytes(job: Job) -> Iterator[tuple[int, int]]:
    """By stage: bytes that they count by name with nothing offloaded, and those that a ratio of 1 spares: (N - 4)C of N chunks in
    flight, and (N - 3)C on the last stage, whose newest chunk is never on its way. Some bytes that we name are in their rest."""
    last = job.parallel.pipeline - 1
    for answer in _answers(job):
        beside = parts_beside_layers(job, answer.stage)
        moments = [beside.at(moment) for moment in beside.moments if moment in ("backward", "loss")]
        named = max(memory.total - memory.in_hand - memory.messages - memory.buffers - memory.rest for memory in moments)
        movable = max(0, answer.in_flight - CHUNKS_NOT_OFFLOADED + (answer.stage == last))
        yield named + answer.in_flight * answer.chunks.most_resident_bytes, movable * answer.chunks.most_resident_bytes


def _smallest_ratio(job: Job) -> float:
    """The smallest ratio, in thousandths, at which everything but the rest fits in their budget (68.2e9 B on 80 GB); infinite if
    none does."""
    excesses = ((named - job.memory_budget_bytes + REST_BYTES, spared) for named, spared in _named_bytes(job))
    over = [(excess, spared) for excess, spared in excesses if excess > 0]
    return max((ceil(1000 * excess / spared) / 1000 if excess <= spared else inf for excess, spared in over), default=0.0)


def _offload_ratios(runs: list[Mapping[str, Any]]) -> Iterator[Row]:
    for run in runs:
        layout = f"t{run['t']} p{run['p']} l{run['l']}, {run['ckpt']}"
        what = f"figure 9: offload ratio, {run['model']} on {run['n_gpus']} GPUs ({layout})"
        yield Row(SOURCE, what, run["alpha"], _smallest_ratio(job_of(run)), "", bound=0.01, error_in="unit")


def _choices(runs: list[Mapping[str, Any]]) -> Row:
    """Whether we choose their checkpointing: none, norms and activations, or whole layers, each with the offloading it needs."""
    same = sum(_fastest_policy(run) == POLICIES[run["ckpt"]] for run in runs)
    what, chose = "figure 9: runs whose checkpointing we would choose, too", "h800-80g: pcie.efficiency, on 80 and 128 GPUs"
    return Row(SOURCE, what, len(runs), same, "runs", 0.0, error_in="unit", calibrates=chose)


def _fastest_policy(run: Mapping[str, Any]) -> str:
    """By the solver's seconds, in which copies wait for messages as theirs do."""
    seconds = {}
    for theirs, policy in POLICIES.items():
        job = job_of({**run, "ckpt": theirs})
        if (ratio := _smallest_ratio(job)) <= 1:
            answers = _answers(job, ratio)
            slowest_s = max(answer.stock.both_s + answer.longer_s for answer in answers)
            seconds[policy] = job.microbatches * slowest_s + max(answer.exposed_copies_s for answer in answers)
    return min(seconds, key=lambda policy: seconds[policy])


def _throughput(runs: list[Mapping[str, Any]]) -> Iterator[Row]:
    errors = []
    for run in runs:
        what = f"figure 9: throughput, {run['model']} on {run['n_gpus']} GPUs"
        row = _throughput_row(what, run, "h800-80g", run["tokens_per_second"], run["n_gpus"] in CALIBRATING_GPUS)
        if row.calibrates is None:
            errors.append(abs(row.error))
        yield row
    of_runs = f"error of throughput, of the {len(errors)} runs that it is not calibrated on"
    yield Row(SOURCE, f"figure 9: mean {of_runs}", 0.0, sum(errors) / len(errors), "%", bound=5.0, error_in="unit")
    yield Row(SOURCE, f"figure 9: worst {of_runs}", 0.0, max(errors), "%", bound=12.0, error_in="unit")


def _step_s(job: Job, offload_ratio: float) -> float:
    """As stock Megatron runs the job, if it can; else by a plan."""
    setting = OF_POLICY.get(job.policy)
    if setting is not None and not offload_ratio:
        return stock_step_s(job, setting)
    return fitting(Stages(endless(job, offload_ratio), analytic_profile(job))).figures.step_s


def _throughput_row(what: str, run: Mapping[str, Any], cluster: str, published: float, calibrating: bool) -> Row:
    job = job_of(run, cluster)
    tokens, chose = job.batch.global_ * job.model.seq, f"{cluster}: matmul.efficiency" if calibrating else None
    price_s = partial(_step_s, offload_ratio=run["alpha"])
    step = Step(job, tokens / published, price_s, workload=run.get("workload", ""))
    return Row(SOURCE, what, published, tokens / price_s(job), "tokens/s", bound=12.0, calibrates=chose, step=step)


def _demo_throughput(demo: Mapping[str, Any]) -> Iterator[Row]:
    """The cost model does not distinguish stock (`origin_megatron`), which lacks their faster norms and rotary embeddings."""
    gpus = demo["config"]["gpus"]
    for run, name, cluster in _demo_runs(demo):
        what = f"demo: throughput of {run['method']}, Llama-7B on {gpus} {name}"
        workload = "" if run["method"] == "origin_megatron" else f"{SOURCE} demo {name}"  # its kernels differ, not its settings
        stated = {**_of_demo(demo, run), "alpha": run.get("alpha", 0), "workload": workload}
        published, calibrating = gpus * run[name]["tok_s_gpu"], (run["method"], name) == CALIBRATING_DEMO
        yield _throughput_row(what, stated, cluster, published, calibrating)


def _of_demo(demo: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    return {**demo["config"], "model": "Llama-7B", "n_gpus": demo["config"]["gpus"], "ckpt": run["ckpt"]}


def _demo_runs(demo: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], str, str]]:
    return ((run, name, cluster) for run in demo["rows"] for name, cluster in CLUSTERS.items() if name in run)


def _demo_memory(demo: Mapping[str, Any]) -> Iterator[Row]:
    for run in demo["rows"]:
        job = job_of(_of_demo(demo, run))
        if run.get("alpha"):
            what = f"demo: offload ratio of {run['method']}, Llama-7B on {job.gpus} GPUs"
            yield Row(SOURCE, what, run["alpha"], _smallest_ratio(job), "", bound=0.01, error_in="unit")
        if run.get("result") == "OOM":
            beyond = float(least_bytes(job, NONE) > GIB * job.cluster.memory_gib)
            yield Row(SOURCE, f"demo: {run['method']} runs out of memory", 1, beyond, "", bound=0.0, error_in="unit")


def _utilisation(demo: Mapping[str, Any]) -> Iterator[Row]:
    for run, name, cluster in _demo_runs(demo):
        job = job_of(_of_demo(demo, run), cluster)
        computed = 100 * mfu(job.model, run[name]["tok_s_gpu"], _peak(job))
        what = f"demo: MFU of {run['method']}, Llama-7B on {name}, from its tokens/s"
        yield Row(SOURCE, what, run[name]["mfu"], computed, "points", bound=0.1, error_in="unit")


def _peak(job: Job) -> float:
    assert job.cluster.matmul is not None, "catalogued GPU clusters have one"
    return job.cluster.matmul.peak_flop_per_s(job.model.dtype)
