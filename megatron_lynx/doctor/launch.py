"""Arguments of a launch that remove windows or that plans refuse, and host-bound passes.

host time of this machine ──┐
launch, --cluster ──job──> device seconds of every pass ──> host-bound or not, as launched
plan ─────────────────────> rehearsed ────────────────────> host-bound or not, under the plan
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lynx.config.cluster import HostTime, Setting
from megatron_lynx.cost.host import HostReport
from megatron_lynx.doctor.environment import Finding, groups_of
from megatron_lynx.errors import LynxError
from megatron_lynx.estimate import host_report
from megatron_lynx.launch_arguments import Reading, job_of, read_launch
from megatron_lynx.launch_arguments.given import Given
from megatron_lynx.launch_arguments.reading import unknown_in_words
from megatron_lynx.launch_arguments.today import FINE_GRAINED, GRAPHS, captures, why_alone
from megatron_lynx.plan import Plan
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.units import format_seconds

RING = "use_ring_exchange_p2p"
TODAY = {
    "overlap_moe_expert_parallel_comm": "expert-parallel overlap",
    "delay_wgrad_compute": "delayed weight gradients",
    "recompute_granularity": "stock recomputation",
    "recompute_activations": "stock recomputation",
    "moe_layer_recompute": "stock recomputation",
    "cpu_offloading_num_layers": "stock offloading",
    "fine_grained_activation_offloading": "stock offloading",
    "distribute_saved_activations": "stock recomputation",
    "enable_cuda_graph": "CUDA graphs",
    "external_cuda_graph": "CUDA graphs",
    "cuda_graph_impl": "CUDA graphs",
}


def launch(reading: Reading, variables: Mapping[str, str]) -> Iterator[Finding]:
    given = reading.given
    if given.is_on(RING):
        costs = "it returns nothing to wait for: no pipeline windows, plans are refused"
        yield Finding("ring exchange", "defeats", given.origin(RING), costs, "drop it")
    yield from _replaced(reading)
    yield from _wrong_in_stock(reading)
    tensor, pipeline = given["tensor_model_parallel_size"] or 1, given["pipeline_model_parallel_size"] or 1
    userbuffers = bool(given["tp_comm_overlap"]) and tensor > 1
    if userbuffers:
        costs = "exchanges lie inside GEMMs: no tensor-parallel windows, linears do not run again; `plan` says whether that pays"
        yield Finding("userbuffers", "note", given.origin("tp_comm_overlap"), costs)
    if groups := groups_of(reading):
        yield Finding("windows", "good", f"waits for {', '.join(groups)}")
        yield _weight_gradients(reading)
    else:
        state = f"{'userbuffers' if userbuffers else f'tensor {tensor}'}, pipeline {pipeline}, no exchange of experts"
        costs = "nothing can be hidden: recomputation would be exposed, only copies to the host overlap"
        todo = "compare with a plan without --tp-comm-overlap" if userbuffers else "stock recomputation does as well here"
        yield Finding("windows", "defeats", state, costs, todo)
    if given["num_experts"]:
        costs = "routers and exchanges of tokens are kept, and run once: items between them may be recomputed"
        yield Finding("experts", "note", given.origin("num_experts"), costs)
    if pipeline > 1:
        yield _messages(reading)
    yield _checked_results(reading)
    if given["fine_grained_activation_offloading"] and variables.get("NVTE_CPU_OFFLOAD_V1") != "1":
        costs = "with Transformer Engine from 2.10 on Megatron stops: weights would be offloaded, too"
        yield Finding("NVTE_CPU_OFFLOAD_V1", "note", variables.get("NVTE_CPU_OFFLOAD_V1", "not set"), costs, "set 1")
    if (unknown := unknown_in_words(reading)) is not None:
        yield Finding("unknown flags", "note", unknown, "if Megatron's own, they are mistyped, and it stops")
    for problem in reading.problems:
        yield Finding("launch", "note", str(problem), "no plan can be made of this launch as it stands")
    for flag, instead in reading.priced_as:
        yield Finding(flag, "note", "given", f"plans count it as {instead}")


def _replaced(reading: Reading) -> Iterator[Finding]:
    planned = any(word.partition("=")[0] == "--lynx-plan" for word in reading.command.arguments)
    for name, topic in TODAY.items():
        if not reading.given.is_on(name):
            continue
        origin = reading.given.origin(name)
        if name in GRAPHS and not why_alone(reading.given):
            yield Finding(topic, "note", origin, "what is captured is kept whole: the plan has to be made for this launch")
        elif planned:
            yield Finding(topic, "defeats", origin, "two deciders: the plan is refused", "drop it")
        else:
            yield Finding(topic, "note", origin, "what the launch does today: `plan` prints the launch without it")


def _wrong_in_stock(reading: Reading) -> Iterator[Finding]:
    """Bugs of Megatron in all supported releases."""
    given = reading.given
    if (drawn := _dropped_out_again(given)) and (given["te_rng_tracker"] or captures(given)):
        tracker = given.origin("te_rng_tracker") if given["te_rng_tracker"] else "CUDA graphs, which take --te-rng-tracker"
        costs = (
            "stock's recomputation draws other dropout masks than its forward, so gradients are wrong: it keeps no copies of "
            "the generators (Megatron-LM #5841, mended on its dev branch alone)"
        )
        todo = (
            f"run under a plan, which restores what is in the generators; or drop {tracker.split(',')[0]}, {drawn} or the dropout"
        )
        yield Finding("dropout recomputed", "defeats", f"{tracker}, {drawn}", costs, todo)
    if given[FINE_GRAINED]:
        costs = (
            "until the first step is over, a backward may read a copy from the host that is not yet complete: its gradients are "
            "wrong, and nothing says so (Megatron-LM #7398, open; #7399 is to mend it)"
        )
        todo = "apply #7399, or run under a plan, whose copies are waited for; else compare the first step with a run without it"
        yield Finding("stock offloading's first step", "defeats", given.origin(FINE_GRAINED), costs, todo)


def _dropped_out_again(given: Given) -> str:
    """The flag by which stock recomputes a dropout; empty if it recomputes none."""
    attention, hidden = given["attention_dropout"], given["hidden_dropout"]
    if given["recompute_granularity"] == "full" and (attention or hidden):
        return "--recompute-granularity full"
    selective = given["recompute_activations"] or given["recompute_granularity"] == "selective"
    core = "core_attn" in (given["recompute_modules"] or ["core_attn"])
    return "recomputation of core_attn" if selective and core and attention else ""


def _weight_gradients(reading: Reading) -> Finding:
    given = reading.given
    if given["gradient_accumulation_fusion"] is False:
        costs = "they are not added up where they lie: plans cannot defer them into waits"
        return Finding("weight gradients", "note", given.origin("gradient_accumulation_fusion"), costs, "drop it")
    if given["defer_embedding_wgrad_compute"]:
        costs = "two deciders: plans that defer weight gradients into waits are refused"
        return Finding("weight gradients", "note", given.origin("defer_embedding_wgrad_compute"), costs, "drop it")
    return Finding("weight gradients", "good", "plans may defer them into waits")


def _messages(reading: Reading) -> Finding:
    """Messages between stages: plain schedules end every exchange in a device-wide wait that no flag disables."""
    given, chunked = reading.given, reading.is_chunked
    if chunked and given["overlap_p2p_comm"] is not False:
        return Finding("messages between stages", "good", "interleaved schedule: waited for later than issued")
    costs = "every message ends in torch.cuda.synchronize(): recomputation still overlaps, the host has nothing queued after it"
    costs += ", and copies to the host that were asked for before it are waited for (plans: beside_messages: avoid)"
    if chunked:
        todo = "drop it: overlapped messages need no sync"
        return Finding("batch_p2p_sync", "slows", given.origin("overlap_p2p_comm"), costs, todo)
    todo = "set config.batch_p2p_sync to False in the training script (no flag does), or use virtual stages"
    return Finding("batch_p2p_sync", "slows", "on, Megatron's default without virtual stages", costs, todo)


def _checked_results(reading: Reading) -> Finding:
    """Megatron checks for NaN: `loss_func` of pretrain_gpt.py reads the loss twice, `check_grads` each bucket's norm."""
    given, topic = reading.given, "check for NaN"
    if not given["check_for_nan_in_loss_and_grad"]:
        return Finding(topic, "good", given.origin("check_for_nan_in_loss_and_grad"))
    if given["fp16"] and not given["loss_scale"]:
        return Finding(topic, "good", "off: Megatron leaves it to the dynamic loss scale")
    costs = (
        "the last stage's host reads each micro-batch's loss twice, every rank the norm of each bucket of gradients before it is "
        "reduced: Python's lead is gone there, and the GPU waits until the backward's first kernels are issued"
    )
    todo = (
        "--no-check-for-nan-in-loss-and-grad; what is lost: the run no longer stops at a rank's first NaN or Inf, "
        "and does not run the step again to find a faulty GPU; the log still counts steps with a NaN"
    )
    return Finding(topic, "note", f"on, {given.origin('check_for_nan_in_loss_and_grad')}", costs, todo)


TOPIC = "host time"


@dataclass(frozen=True)
class Unmeasured:
    reason: str


def host_time(
    measured: HostTime | Unmeasured,
    words: Sequence[str] = (),
    cluster: str | None = None,
    plan: Plan | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Iterator[Finding]:
    """Host time of a layer on this machine, and whether a launch on a cluster, and its plan, are host-bound."""
    if isinstance(measured, Unmeasured):
        costs = "whether a launch waits for Python is not known"
        yield Finding(TOPIC, "note", f"not measured: {measured.reason}", costs, "install what is missing, and ask again")
        return
    for implementation in measured.measured:
        layer = measured.of(implementation)
        figures = ", ".join(f"{words} {format_seconds(layer.layer_s(setting))}" for setting, words in SHOWN.items())
        whose = measured.words_for(implementation)
        yield Finding(TOPIC, "good", f"a layer and micro-batch, forward and backward: {figures} ({whose})")
    if not words or cluster is None:
        costs = "passes that are shorter on the GPU wait for Python"
        yield Finding("host-bound", "note", "not judged", costs, "name the GPUs of a launch: --cluster C -- LAUNCH")
        return
    try:
        yield from _judged(measured, words, cluster, plan, changes)
    except LynxError as error:
        problems = "; ".join(map(str, error.problems)) or str(error)
        yield Finding("host-bound", "note", f"not judged: {problems}", "whether the launch waits for Python is not known")


SHOWN: dict[Setting, str] = {
    "none": "stock none",
    "full": "stock full",
    "kept": "a plan that keeps all",
    "recomputed": "one that recomputes all",
}


def _judged(
    measured: HostTime, words: Sequence[str], cluster: str, plan: Plan | None, changes: Mapping[str, Any] | None
) -> Iterator[Finding]:
    """Judge the launch under stock's recomputation, then the plan. Raises `LynxError` if they cannot be priced."""
    job = job_of(read_launch(words, planning=False), cluster, changes)
    costs = analytic_profile(job).model_copy(update={"host_time": measured})
    stock_job = job.model_copy(update={"policy": "none"}) if job.policy == "planned" else job
    yield _finding("host-bound launch", HostReport.of(costs, host_report(stock_job, costs).bound))
    if plan is not None:
        yield _finding("host-bound plan", HostReport.of(costs, rehearse(plan, costs).host_bound))


def _finding(topic: str, report: HostReport) -> Finding:
    if not report.bound:
        return Finding(topic, "good", f"no: Python stays ahead of the GPU in every pass (host time of {report.words})")
    worst = max(report.bound, key=lambda load: load.host_s / load.device_s)
    stages = ", ".join(str(load.stage) for load in report.bound)
    seconds = f"{format_seconds(worst.host_s)} of a step on the host, {format_seconds(worst.device_s)} on the GPU"
    whose = f"(host time of {report.words})"
    costs = "the GPU waits for Python: hiding recomputation gains nothing there"
    todo = "a larger micro-batch, a smaller tensor-parallel size, or a plan made with --profile, which then touches fewer halves"
    return Finding(topic, "slows", f"stages {stages}; stage {worst.stage}: {seconds} {whose}", costs, todo)
