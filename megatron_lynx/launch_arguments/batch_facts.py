"""What a launch says about its batch and its parallel groups."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.errors import Problem
from megatron_lynx.launch_arguments.fact import Fact
from megatron_lynx.launch_arguments.given import Given

SIZES = {"tensor": "tensor_model_parallel_size", "pipeline": "pipeline_model_parallel_size"}


def group_facts(given: Given) -> Iterator[Fact]:
    """Sizes of Megatron's parallel groups, but for those of `context_facts`. As in Megatron, sequence parallelism needs more
    than one tensor-parallel rank."""
    for place, name in SIZES.items():
        yield Fact(f"parallel.{place}", given[name], given.origin(name))
    asked, tensor = given["sequence_parallel"], given["tensor_model_parallel_size"]
    without = " has no effect with tensor 1" if asked and tensor == 1 else ""
    yield Fact("parallel.sequence_parallel", bool(asked and tensor != 1), given.origin("sequence_parallel") + without)
    yield Fact("parallel.distributed_optimizer", given["use_distributed_optimizer"], given.origin("use_distributed_optimizer"))


def batch_facts(given: Given, gpus: int | None, problems: list[Problem]) -> Iterator[Fact]:
    """Sizes of micro-batch and batch. Of a batch size that ramps up, the last one counts."""
    micro = given["micro_batch_size"]
    if micro is None:
        if "micro_batch_size" not in given.values:
            problems.append(Problem("--micro-batch-size", "nothing", "this flag"))
        return
    yield Fact("batch.micro", micro, given.origin("micro_batch_size"))
    ranks = given["tensor_model_parallel_size"] * given["context_parallel_size"] * given["pipeline_model_parallel_size"]
    if given["step_batch_size_schedule"] is not None:
        yield from _last_of_schedule(given, problems)
    elif given["global_batch_size"] is not None:
        ramp = f", the end of {given.origin('rampup_batch_size')}" if given["rampup_batch_size"] else ""
        yield Fact("batch.global", given["global_batch_size"], given.origin("global_batch_size") + ramp)
    elif gpus and gpus >= ranks:
        yield Fact("batch.global", micro * (gpus // ranks), "micro x replicas: no --global-batch-size")


def _last_of_schedule(given: Given, problems: list[Problem]) -> Iterator[Fact]:
    """`0:16 2.4B:320`: from 2.4e9 samples or tokens on, 320."""
    origin, text = given.origin("step_batch_size_schedule"), str(given["step_batch_size_schedule"])
    if given["global_batch_size"] is not None:
        problems.append(Problem(origin, "also --global-batch-size", "one of them: Megatron refuses both"))
    last = text.split()[-1].rpartition(":")[2] if text.split() else ""
    if last.isdecimal():
        yield Fact("batch.global", int(last), f"{origin}: its end")
    else:
        problems.append(Problem(origin, text, "pairs FROM:SIZE"))
