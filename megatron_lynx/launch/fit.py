"""Whether Megatron's arguments fit a plan, as far as that can be told before a model is built.

The rest is told by `apply.match` and `apply.refusals`, from the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from operator import attrgetter
from typing import Any

from megatron_lynx.apply.live_run import recipe_of
from megatron_lynx.errors import Problem
from megatron_lynx.limits import ARGUMENTS, refused
from megatron_lynx.plan import Plan

GIVEN = {True: "given", False: "not given"}


def arguments_against(plan: Plan, args: Any) -> Iterator[Problem]:
    """Every argument (validated: Megatron has filled in its defaults) that is not as the plan has it, or works against it."""
    yield from _sizes(plan, args)
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
    """Every argument that does not go together with `--lynx-schedule double-buffered`."""
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
"""What of the package `deep_ep` each backend of Megatron's flex dispatcher is made of."""


def _backend(args: Any) -> Iterator[Problem]:
    """Megatron stops where a model is built without it: on this rank, while others wait for it."""
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


def _sizes(plan: Plan, args: Any) -> Iterator[Problem]:
    needed = {
        "tensor_model_parallel_size": plan.parallel.tensor,
        "context_parallel_size": plan.parallel.context,
        "pipeline_model_parallel_size": plan.parallel.pipeline,
        "num_layers": plan.model.layers,
        "hidden_size": plan.model.hidden,
        "ffn_hidden_size": plan.model.ffn,
        "num_attention_heads": plan.model.heads,
        "seq_length": plan.model.seq,
        "micro_batch_size": plan.batch.micro,
    }
    for name, planned in needed.items():
        found = getattr(args, name, None)
        if name == "num_layers" and getattr(args, "hybrid_layer_pattern", None):
            continue  # two of them are one of a plan's layers, if they are what `apply.hybrid` knows
        if found != planned:
            todo = "launch with the plan's, or make a plan for this launch"
            yield Problem(f"--{name.replace('_', '-')}", str(found), f"{planned}, as the plan has it", todo)
    implementation, special = getattr(args, "transformer_impl", None), getattr(args, "spec", None)
    if implementation not in (None, plan.model.implementation) and special is None:
        todo = "launch with the plan's, or make a plan for this launch: windows and bytes differ"
        yield Problem("--transformer-impl", implementation, f"{plan.model.implementation}, as the plan has it", todo)
    recipe = recipe_of(args)
    if recipe != plan.model.fp8:
        todo, bits = "launch with the plan's, or make a plan for this launch: bytes differ", "fp4" if recipe == "nvfp4" else "fp8"
        yield Problem(f"--{bits}-recipe", recipe or "no --fp8-format", f"{plan.model.fp8 or 'no FP8'}, as the plan has it", todo)
    held = bool(recipe and getattr(args, "fp8_param_gather", False))
    if held != plan.model.fp8_parameters:
        todo = "launch as the plan has it, or make a plan for this launch: bytes differ"
        yield Problem("--fp8-param-gather", GIVEN[held], f"{GIVEN[plan.model.fp8_parameters]}, as the plan has it", todo)
    chunks = getattr(args, "virtual_pipeline_model_parallel_size", None) or 1
    if chunks != plan.parallel.chunks:
        needed_chunks = f"{plan.parallel.chunks}, as the plan has it"
        yield Problem("--num-virtual-stages-per-pipeline-rank", f"{chunks} (chunks on each stage)", needed_chunks)
    parallel = bool(getattr(args, "sequence_parallel", False)) and plan.parallel.tensor > 1
    if parallel != plan.parallel.sequence_parallel:
        yield Problem("--sequence-parallel", GIVEN[parallel], f"{GIVEN[plan.parallel.sequence_parallel]}, as the plan has it")
    yield from _userbuffers(plan, args)


def _userbuffers(plan: Plan, args: Any) -> Iterator[Problem]:
    """With them a plan has no tensor-parallel windows and its linears do not run again; without them there are windows."""
    given = bool(getattr(args, "tp_comm_overlap", False)) and plan.parallel.tensor > 1
    if given and not plan.parallel.userbuffers:
        todo = "drop it, or make a plan for a launch with it"
        yield Problem("--tp-comm-overlap", "given", "not given: the plan's windows are collectives of their own", todo)
    if plan.parallel.userbuffers and not given:
        todo = "launch with it, or make a plan for a launch without it, which has windows"
        yield Problem("--tp-comm-overlap", "not given", "given, as the plan has it (parallel.userbuffers)", todo)
