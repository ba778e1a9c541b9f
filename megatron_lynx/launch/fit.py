"""Compares Megatron's arguments with a plan, before a model is built. `apply.match` and `apply.refusals` compare the model."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from operator import attrgetter
from typing import Any

from megatron_lynx.apply.match import launch_mismatches
from megatron_lynx.errors import Problem
from megatron_lynx.limits import ARGUMENTS, refused
from megatron_lynx.plan import Plan


def arguments_against(plan: Plan, args: Any) -> Iterator[Problem]:
    """Yield a problem for every argument (defaults filled in) that differs from the plan or is refused with one."""
    yield from launch_mismatches(plan, args)
    yield from _backend(args)
    if plan.schedule == "double_buffered" and isinstance(getattr(args, "lynx_check", None), int):
        found = "a plan without flushes, whose gradients are not complete when a step ends"
        todo = "check frames, or a plan for --lynx-schedule flush"
        yield Problem("--lynx-check", found, "--lynx-check frames, or a plan that flushes", todo)
    found, planned = getattr(args, "lynx_schedule", "flush"), plan.schedule.replace("_", "-")
    if found != planned:
        todo = "launch with the plan's, or make a plan for this one"
        yield Problem("--lynx-schedule", str(found), f"{planned}, as the plan has it", todo)
    yield from refused(args, ["plan"], attrgetter("option"), ARGUMENTS)


def against_two_versions(args: Any) -> Iterator[Problem]:
    """Yield a problem for every argument that `--lynx-schedule double-buffered` refuses."""
    flag, stages = "--lynx-schedule double-buffered", args.pipeline_model_parallel_size
    chunks = getattr(args, "virtual_pipeline_model_parallel_size", None) or 1
    if stages == 1:
        yield Problem("--pipeline-model-parallel-size", "1", f"at least 2 with {flag}", f"one stage has no flush, or drop {flag}")
    if chunks > 1:
        todo = f"drop the flags of interleaving, or drop {flag}"
        yield Problem("model chunks of each stage", str(chunks), f"1 with {flag}", todo)
    microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    if microbatches < stages:
        sizes = f"--global-batch-size {args.global_batch_size} / {args.micro_batch_size} / {args.data_parallel_size}"
        needed = f"at least {stages}, one for each stage, with {flag}"
        todo = f"enlarge --global-batch-size, or drop {flag}"
        yield Problem("micro-batches per update", f"{microbatches} ({sizes})", needed, todo)
    yield from refused(args, ["two versions"], attrgetter("option"), ARGUMENTS, name=attrgetter("argument"))


BUFFERS = {"deepep": "Buffer", "hybridep": "HybridEPBuffer"}
"""The class in the package `deep_ep` that each backend of Megatron's flex dispatcher needs."""


def _backend(args: Any) -> Iterator[Problem]:
    """Check for the dispatcher's package: without it Megatron fails later, on this rank alone, while others wait for it."""
    if getattr(args, "moe_token_dispatcher_type", None) != "flex":
        return
    backend = getattr(args, "moe_flex_dispatcher_backend", None) or "deepep"
    if backend in BUFFERS and not hasattr(_deep_ep(), BUFFERS[backend]):
        todo = "install DeepEP on every node, or launch, and plan, with --moe-token-dispatcher-type alltoall"
        needed = f"a package deep_ep with {BUFFERS[backend]}, which is not installed on this rank"
        yield Problem("--moe-flex-dispatcher-backend", backend, needed, todo)


def _deep_ep() -> Any:
    try:
        return import_module("deep_ep")
    except ImportError:
        return None
