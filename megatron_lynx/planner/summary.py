"""A plan as JSON: launch flags, and figures of each stage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_lynx.config.job import Job
from megatron_lynx.environment import FORWARD_MARGIN, USUAL_MARGIN, starts_as_one
from megatron_lynx.kinds.experts.section import FUSED
from megatron_lynx.plan.layout import launch_flags
from megatron_lynx.plan.plan import Plan
from megatron_lynx.plan.timetables import norms_in_windows
from megatron_lynx.planner.decision import Decision


def summary(decision: Decision) -> dict[str, Any]:
    """Output of `megatron-lynx plan --json`."""
    plan, memory = decision.plan, decision.memory
    return {
        **decision.figures._asdict(),
        "host_time": decision.host.as_json,
        "weight_gradients": decision.weight_gradients,
        "partition": [len(stage.layers) for stage in plan.stages],
        "launch_flags": [*launch_flags(plan), *job_flags(decision.job)],
        "launch_environment": job_environment(decision.job, plan),
        "stages": [
            {
                "stage": entry.stage,
                "chunk": entry.chunk,
                "layers": str(entry.layers),
                "ahead_depth": entry.ahead_depth,
                "offload_ratio": decision.stages[entry.stage].asked.ratio,
                "offload_bytes": 0 if entry.offload is None else entry.offload.bytes,
                "memory_bytes": memory[entry.stage].named,
                "predicted": entry.predicted.model_dump(mode="json"),
            }
            for entry in plan.stages
        ],
    }


def job_flags(job: Job) -> Iterator[str]:
    """Yield launch flags that a plan does not state."""
    if (experts := job.model.experts) is not None:
        yield f"--num-experts {experts.count}"
        yield f"--moe-router-topk {experts.per_token}"
        yield f"--moe-ffn-hidden-size {experts.ffn}"
        if experts.shared_ffn:
            yield f"--moe-shared-expert-intermediate-size {experts.shared_ffn}"
        if len(job.model.expert_layers) < job.model.layers:
            pattern = "+".join(f"[{int(layer in job.model.expert_layers)}]" for layer in range(1, job.model.layers + 1))
            yield f"--moe-layer-freq '{pattern}'"
        fused = experts.dispatcher in FUSED
        yield f"--moe-token-dispatcher-type {'flex' if fused else experts.dispatcher}"
        if fused:
            yield f"--moe-flex-dispatcher-backend {experts.dispatcher}"
        yield f"--expert-model-parallel-size {job.parallel.expert}"
        yield f"--expert-tensor-parallel-size {job.parallel.expert_tensor_size}"
    if job.parallel.distributed_optimizer:
        yield "--use-distributed-optimizer"
    if job.parallel.optimizer_instances > 1:
        yield f"--num-distributed-optimizer-instances {job.parallel.optimizer_instances}"
    yield from host_optimizer_flags(job)
    yield f"--global-batch-size {job.batch.global_}"


def host_optimizer_flags(job: Job) -> Iterator[str]:
    if job.optimizer.offloaded:
        yield from ("--use-precision-aware-optimizer", "--optimizer-cpu-offload")
        yield f"--optimizer-offload-fraction {job.optimizer.offloaded:g}"
        if job.optimizer.overlap_copies:
            yield "--overlap-cpu-optimizer-d2h-h2d"


def job_environment(job: Job, plan: Plan) -> dict[str, str]:
    """Environment variables that the plan's windows need."""
    model, norms = job.model, norms_in_windows(plan)
    of_te = model.uses_te and model.fp8_recipe != "mxfp8"  # with MXFP8, norms are cuDNN's
    if not of_te or not norms or not starts_as_one(model.norm, model.hidden, half_precision=model.dtype != "fp32"):
        return {}
    return {FORWARD_MARGIN: str(USUAL_MARGIN)}
