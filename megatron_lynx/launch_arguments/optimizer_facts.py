"""Types of gradients and of the optimizer's state, as in `validate_args` and `OptimizerConfig`.

--bf16   gradients in fp32      unless --grad-reduce-in-bf16, or --main-grads-dtype bf16
--fp16   gradients in fp16      unless --accumulate-allreduce-grads-in-fp32

--optimizer muon                layers' weights use Muon (`cost.muon`), all others Adam or Lion (--muon-scalar-optimizer)
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.errors import Problem
from megatron_lynx.launch_arguments.given import Fact, Given

AWARE = "use_precision_aware_optimizer"
SUM_IN_FP32 = "accumulate_allreduce_grads_in_fp32"
ON_HOST, SHARE, OVERLAPPED = "optimizer_cpu_offload", "optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d"
OF_THE_HOST = (ON_HOST, SHARE, OVERLAPPED)
"""Arguments to drop if the plan keeps the optimizer on the device."""

CHUNKED, LEGACY = "--chunked-optimizer-state-offload", "--offload-optimizer-states"
CHUNK, FRACTION = "--optimizer-state-offload-chunk-size-mb", "--optimizer-state-offload-fraction"
STATES_ON_HOST = (CHUNKED, LEGACY, CHUNK, FRACTION)
"""Flags of Megatron's dev branch, newer than 0.19."""

STATE = {"first_moment": "exp_avg_dtype", "second_moment": "exp_avg_sq_dtype"}

MUONS = {"muon": 1, "dist_muon": 1, "adaptive_muon": 2}
"""State elements per element of a layer's weight."""
STATES = {"adam": 2, "sgd": 1, "lion": 1, "ademamix": 3}
"""State elements in fp32 per parameter, including forks' optimizers. SOAP is missing: its preconditioners are whole matrices."""


def optimizer_facts(given: Given, problems: list[Problem]) -> Iterator[Fact]:
    """Yield the facts of the optimizer. Combinations that Megatron refuses are added to `problems`."""
    yield _gradients(given, problems)
    yield from _states(given, problems)
    yield from _states_on_host(given, problems)
    types = {name: given[name] for name in (*STATE.values(), "main_params_dtype", "main_grads_dtype")}
    if not given[AWARE]:
        if given[ON_HOST]:
            problems.append(Problem(given.origin(ON_HOST), "given", "--use-precision-aware-optimizer beside it"))
        for name, value in types.items():
            if value not in (None, "fp32"):
                problems.append(Problem(given.origin(name), str(value), "--use-precision-aware-optimizer beside it"))
        return
    if not given["use_distributed_optimizer"]:
        problems.append(Problem(given.origin(AWARE), "given", "--use-distributed-optimizer beside it"))
    yield Fact("optimizer.precision_aware", True, given.origin(AWARE))
    if given[ON_HOST]:
        yield Fact("optimizer.offload", given[SHARE], given.origin(SHARE if SHARE in given.values else ON_HOST))
        yield Fact("optimizer.overlap_copies", given[OVERLAPPED], given.origin(OVERLAPPED))
    for place, name in STATE.items():
        yield Fact(f"optimizer.{place}", types[name], given.origin(name))
    if types["main_params_dtype"] == "fp32" and given["bf16"]:
        yield Fact("optimizer.main_parameters", "remainder", f"{given.origin(AWARE)}: fp32, less what the bf16 weights have")
    else:
        yield Fact("optimizer.main_parameters", types["main_params_dtype"], given.origin("main_params_dtype"))


def _states(given: Given, problems: list[Problem]) -> Iterator[Fact]:
    name, origin = str(given["optimizer"]), given.origin("optimizer")
    if name not in (*STATES, *MUONS):
        needed = f"one of {', '.join((*STATES, *MUONS))}"
        problems.append(Problem(origin, name, needed, "what others remember is not known"))
        return
    if name == "adam":
        return
    if name in MUONS:
        yield Fact("optimizer.muon_steps", given["muon_num_ns_steps"], given.origin("muon_num_ns_steps", "optimizer"))
        yield Fact("optimizer.matrix_states", MUONS[name], f"{origin} {name}")
        name, origin = str(given["muon_scalar_optimizer"] or "adam"), given.origin("muon_scalar_optimizer", "optimizer")
    states = 0 if name == "sgd" and not given["sgd_momentum"] else STATES[name]
    yield Fact("optimizer.states", states, f"{origin} {name}: so many numbers beside each parameter in fp32")
    if given[AWARE]:
        problems.append(Problem(given.origin(AWARE), "given", f"--optimizer adam beside it, found {given['optimizer']}"))


def _states_on_host(given: Given, problems: list[Problem]) -> Iterator[Fact]:
    flag = next((flag for flag in (CHUNKED, LEGACY) if given.unknown_value(flag) is not None), None)
    if flag is None:
        return
    if given[ON_HOST]:
        problems.append(Problem(flag, f"also {given.origin(ON_HOST)}", "one of them: Megatron refuses both"))
    if given["optimizer"] != "adam" and (flag == LEGACY or given["optimizer"] != "muon"):
        problems.append(Problem(flag, f"also --optimizer {given['optimizer']}", "--optimizer adam, or muon with " + CHUNKED))
    for place, option, default in (("states_on_host", FRACTION, 1.0), ("chunk_mib", CHUNK, 0)):
        word = given.unknown_value(option)
        try:
            value = default if word is None else type(default)(word)
        except ValueError:
            problems.append(Problem(option, word or "nothing", "a number"))
        else:
            yield Fact(f"optimizer.{place}", value, flag if word is None else option)


def _gradients(given: Given, problems: list[Problem]) -> Fact:
    place, summed = "optimizer.gradients", given.origin(SUM_IN_FP32)
    if given["fp16"]:
        if given[SUM_IN_FP32]:
            return Fact(place, "fp32", summed)
        return Fact(place, "bf16", f"{given.origin('fp16')} without --accumulate-allreduce-grads-in-fp32: fp16, the same bytes")
    if not given["bf16"]:
        return Fact(place, "fp32", "as the weights")
    if given["main_grads_dtype"] == "bf16":
        if given[SUM_IN_FP32]:
            needed = "--main-grads-dtype fp32: Megatron refuses both"
            problems.append(Problem(summed, f"also {given.origin('main_grads_dtype')} bf16", needed))
        return Fact(place, "bf16", given.origin("main_grads_dtype"))
    if given["grad_reduce_in_bf16"] and given["yaml_cfg"] is None:
        return Fact(place, "bf16", given.origin("grad_reduce_in_bf16"))
    return Fact(place, "fp32", summed if given[SUM_IN_FP32] else f"{given.origin('bf16')}: gradients are added up in fp32")
