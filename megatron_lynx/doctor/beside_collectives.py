"""What has to share the GPU with NCCL's kernels in a window, and may keep them, or itself, from running there.

norm_margin      a norm that starts on all multiprocessors or not at all cannot start beside a collective
stream_priority  with several hardware queues a GEMM may take all multiprocessors before the collective's kernel gets any

Both follow from sources of Transformer Engine and of CUDA; neither was seen on a GPU here (docs/gpu.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

from megatron_lynx.doctor.environment import switched_on
from megatron_lynx.doctor.finding import Finding
from megatron_lynx.launch_arguments import Reading
from megatron_lynx.norm_kernels import BACKWARD_MARGIN, CUDNN, FORWARD_MARGIN, USUAL_MARGIN, Norm, starts_as_one
from megatron_lynx.plan import Plan
from megatron_lynx.plan.timetables import Group, groups_waited_for, norms_in_windows

ALL_STREAMS = "TORCH_NCCL_HIGH_PRIORITY"
"""Environment variable: torch's streams for NCCL have a high priority, whatever their group."""

H100 = 132
"""Its multiprocessors: by them it is said what a margin costs."""


def beside_collectives(reading: Reading | None, variables: Mapping[str, str], plan: Plan | None) -> Iterator[Finding]:
    """Of a launch, of a plan, or of both: with a plan it is known what runs in windows, and in whose."""
    yield from _norm_margin(reading, variables, plan)
    if reading is not None:
        yield from _stream_priority(reading, variables, plan)


def _norm_margin(reading: Reading | None, variables: Mapping[str, str], plan: Plan | None) -> Iterator[Finding]:
    rows = _rows_of(reading) if reading is not None else None if plan is None else _planned_rows(plan)
    if rows is None or switched_on(variables, CUDNN):
        return
    margin = variables.get(FORWARD_MARGIN, "0")
    if margin.isdecimal() and int(margin) > 0:
        yield Finding(FORWARD_MARGIN, "good", f"{margin}; {rows}")
        return
    norms = None if plan is None else norms_in_windows(plan)
    if norms == ():
        yield Finding(FORWARD_MARGIN, "good", f"{margin}; the plan recomputes no norm in a window")
        return
    which = "" if norms is None else f"the plan recomputes {' and '.join(norms)} in windows: "
    costs = (
        f"{which}such a norm starts on all multiprocessors or not at all, so in a window it waits until the collective is over, "
        "and everything behind it waits, too: nothing is hidden"
    )
    todo = (
        f"export {FORWARD_MARGIN}={USUAL_MARGIN}, as Megatron's examples do, or as many as NCCL has channels; norms then take at "
        f"most {USUAL_MARGIN / (H100 - USUAL_MARGIN):.0%} longer on {H100} multiprocessors. {BACKWARD_MARGIN} does the same for "
        "backward, beside reductions of gradients"
    )
    yield Finding(FORWARD_MARGIN, "note" if norms is None else "slows", f"{margin}; {rows}", costs, todo)


def _rows_of(reading: Reading) -> str | None:
    """What norms of a launch work on, if they are Transformer Engine's own kernels and start as one."""
    given = reading.given
    if given["transformer_impl"] == "local" or (given["fp8"] and given["fp8_recipe"] == "mxfp8"):  # whose norms are cuDNN's
        return None
    width, kind = given["hidden_size"] or 0, given["normalization"]
    norm: Norm = "rmsnorm" if kind == "RMSNorm" else "layernorm"
    as_one = starts_as_one(norm, width, half_precision=bool(given["bf16"] or given["fp16"]))
    return f"{kind} of rows of {width}" if as_one else None


def _planned_rows(plan: Plan) -> str | None:
    """The same of a plan, which does not know what kind of norm there is: where both kinds start as one."""
    model = plan.model
    of_te = model.implementation == "transformer_engine" and model.fp8 != "mxfp8"
    as_one = all(starts_as_one(norm, model.hidden) for norm in get_args(Norm))
    return f"norms of rows of {model.hidden}" if of_te and as_one else None


def _stream_priority(reading: Reading, variables: Mapping[str, str], plan: Plan | None) -> Iterator[Finding]:
    """With one hardware queue what is issued first begins first: then there is nothing to say."""
    topic, given = "priority of collectives", reading.given
    groups = _groups_of(reading) if plan is None else groups_waited_for(plan)
    if variables.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1" or not groups:
        return
    if switched_on(variables, ALL_STREAMS):
        yield Finding(topic, "good", f"{ALL_STREAMS}: high for all groups")
        return
    if (path := given["nccl_communicator_config_path"]) is not None:
        costs = f"with several hardware queues these need it: {' '.join(groups)}"
        yield Finding(topic, "note", f"as {path} says", costs, "is_high_priority_stream: true there, for each")
        return
    apart = _receives_apart(reading, groups)
    raised = given["high_priority_stream_groups"] or []
    missing = [group for group in groups if group not in raised or (group == "pp" and apart)]
    if not missing:
        yield Finding(topic, "good", f"high for {' '.join(groups)}")
        return
    costs = (
        "several hardware queues: a GEMM that is recomputed in a window may take all multiprocessors before the collective's "
        "kernel has any; each collective then ends later by up to one kernel, and its window is that much shorter"
    )
    flag = f"--high-priority-stream-groups {' '.join(dict.fromkeys([*raised, *missing]))}"
    todo = f"export {ALL_STREAMS}=1: gradients are received in other groups than pp" if apart else flag
    whose = "windows of" if plan is None else "the plan's windows:"
    yield Finding(topic, "slows", f"normal; {whose} {' '.join(missing)}", costs, todo)


def _groups_of(reading: Reading) -> tuple[Group, ...]:
    """Those for which any plan of the launch may wait."""
    given = reading.given
    sizes: dict[Group, int] = {
        "tp": 1 if given["tp_comm_overlap"] else given["tensor_model_parallel_size"] or 1,
        "ep": (given["expert_model_parallel_size"] or 1) if given["num_experts"] else 1,
        "pp": given["pipeline_model_parallel_size"] or 1,
    }
    return tuple(group for group, size in sizes.items() if size > 1)


def _receives_apart(reading: Reading, groups: Sequence[Group]) -> bool:
    """Whether gradients may be received in other groups than Megatron's own (`apply.hooks.receives`): where schedules are
    interleaved."""
    return "pp" in groups and reading.is_chunked and reading.given["overlap_p2p_comm"] is not False
