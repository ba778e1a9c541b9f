"""Delays weight gradients.

Replaces              local layers     `wgrad_gemm_accum_fp32` and `wgrad_gemm_accum_fp16` of `fused_weight_gradient_mlp_cuda`,
                                       the extension that adds a weight gradient to `main_grad` in place
                      TE's layers      `wgrad_store` on each linear that delays: its backward asks it whether to compute the
                                       weight gradient now, else stores the operands. Made for `delay_wgrad_compute`
Why                   only the update needs a weight gradient, so it can run in a later wait.
Calls the original    local layers: once per call, now or later, with the same operands; for one parameter in the order of the
                      calls. TE's store: never for these decisions; it is disabled under a plan.
Holds                 the weights of linears that delay; pending ones keep their operands, detached from the graph, in FP8 bytes
                      and scales. A grouped linear has lists with the operands of all experts.
Passes through when   the call is not the backward of such a linear (recognised by `main_grad` in local layers); or nothing
                      may be delayed (the last micro-batch with overlapped reduction, a backward outside of Megatron's
                      schedules): then pending gradients of the linear are computed first. A bias gradient of the same GEMM is
                      added when that runs.

A weight gradient may be cut into pieces that fill a wait each: a linear's into blocks of rows, that of experts into groups of
them. Before training each shape is computed whole and in blocks; one that differs in any bit stays whole, as do other shapes.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils.weak import WeakIdKeyDictionary

from megatron_lynx.anatomy import EXPERTS_LINEARS, Role
from megatron_lynx.apply.hook import Claim, instead
from megatron_lynx.apply.hooks.sites import modules_named
from megatron_lynx.apply.kinds import sections_in
from megatron_lynx.apply.live_run import LiveRun, layers_in
from megatron_lynx.errors import Problem
from megatron_lynx.limits import refused
from megatron_lynx.nest import map_nest
from megatron_lynx.plan.plan import Plan
from megatron_lynx.runtime.engine import Engine
from megatron_lynx.runtime.saved import memory_of
from megatron_lynx.runtime.weight_gradients import Linear, WeightGradients

log = logging.getLogger(__name__)

Gemm = Callable[[Tensor, Tensor, Tensor], Any]
"""Adds the weight gradient of an input and of its output's gradient to a `main_grad`, or to rows of it."""
Shape = tuple[int, int, int, int]
"""(tokens, inputs, outputs, pieces)."""
Pieces = Mapping[int, Callable[[], object]]
"""By index."""


class LinearOf(NamedTuple):
    layer: int
    item: str
    role: Role
    expert: int | None = None
    pieces: int = 1
    piece: int = 0
    """Which of these its expert is in, if experts run one by one."""

    @property
    def linear(self) -> Linear:
        return self.layer, self.item

    @property
    def of_experts(self) -> bool:
        return self.role in EXPERTS_LINEARS

    @property
    def place(self) -> str:
        return f"layer {self.layer}.{self.item}{'' if self.expert is None else f'[{self.expert}]'}"


def weights_of(linear: Module) -> list[Parameter]:
    return [parameter for name, parameter in linear.named_parameters(recurse=False) if name.startswith("weight")]


def deferring_linears(plan: Plan, run: LiveRun) -> dict[LinearOf, Module]:
    linears: dict[LinearOf, Module] = {}
    for entry in plan.chunks_of(run.stage):
        for layer in entry.layers:
            rule = entry.rule_for(layer)
            for section in sections_in(run.layers[layer]) if rule.weight_gradients else ():
                named = list(modules_named(section, run.layers[layer], rule.weight_gradients))
                numbers = Counter(item.name for item, _, _ in named)
                for item, expert, module in named:
                    pieces = rule.weight_gradient_pieces.get(item.name, 1)
                    piece = 0 if expert is None else expert * pieces // numbers[item.name]
                    linears[LinearOf(layer, item.name, item.role, expert, pieces, piece)] = module
    return linears


NATIVE = "NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM"
"""With it Transformer Engine's operands are of another type, on GPUs only; delaying these is untested."""


def refused_deferrals(plan: Plan, run: LiveRun) -> Iterator[Problem]:
    if not any(entry.defers for entry in plan.stages):
        return
    yield from refused(run.config, ["weight gradients"])
    live = [[layer.layer_number for layer in layers_in(chunk)] for chunk in run.chunks]
    if [list(entry.layers) for entry in plan.chunks_of(run.stage)] != live:
        return  # the plan is for another model, which `match` reports
    linears = deferring_linears(plan, run)
    numbers, found = Counter(linear.linear for linear in linears), dict[str, Problem]()
    for linear, module in linears.items():
        experts = numbers[linear.linear] * len(weights_of(module)) if linear.of_experts else 0
        cut = refused_pieces(linear.place, module, experts, linear.pieces, fp8=run.fp8)
        for problem in (*_unfit(linear, module, run), *cut):
            found.setdefault(problem.needed, problem)  # the first stands for all
    yield from found.values()


def _unfit(linear: LinearOf, module: Module, run: LiveRun) -> Iterator[Problem]:
    weights = weights_of(module)
    if not all(hasattr(weight, "main_grad") for weight in weights):
        todo = "wrap the model in Megatron's DistributedDataParallel before the plan is installed"
        yield Problem(f"{linear.place}.weight", "no main_grad", "main_grad, to which weight gradients are added", todo)
    if run.uses_te and getattr(module, "wgrad_store", None) is None:
        todo = "install a Transformer Engine that has delay_wgrad_compute, or plan without weight_gradients"
        yield Problem(f"{linear.place}.wgrad_store", "none", "Transformer Engine's WeightGradStore", todo)
    if not linear.of_experts or len(weights) == 1:
        return
    if getattr(module, "use_grouped_tensor", False) or os.environ.get(NATIVE, "0") != "0":  # operands are no tensors of experts
        needed = "off where weight gradients of grouped experts are deferred"
        yield Problem(linear.place, NATIVE, needed, f"unset {NATIVE}, or plan without weight_gradients of experts")
    elif getattr(module, "apply_bias", False):  # the GEMM computes bias gradients as well
        needed = "False where weight gradients of grouped experts are deferred"
        yield Problem(f"{linear.place}.apply_bias", "True", needed, "plan without weight_gradients of experts")


ONE_KERNEL = "NVTE_USE_CUTLASS_GROUPED_GEMM"
TODO = "leave weight_gradient_pieces out for it"


def parts(count: int, pieces: int) -> list[slice]:
    bounds = [count * piece // pieces for piece in range(pieces + 1)]
    return list(map(slice, bounds, bounds[1:]))


def in_rows(gemm: Gemm, given: Tensor, gradient: Tensor, out: Tensor, rows: slice) -> None:
    gemm(given, gradient[:, rows].contiguous(), out[rows])


def equal_in_rows(gemm: Gemm, weight: Tensor, tokens: int, pieces: int) -> bool:
    """Whether a weight gradient of this shape in blocks of rows equals the whole in every bit. `weight`: has the `main_grad`."""
    outputs, inputs = weight.shape
    generator = torch.Generator(weight.device).manual_seed(0)

    def drawn(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(rows, columns, dtype=dtype, device=weight.device, generator=generator)

    given, gradient = drawn(tokens, inputs, weight.dtype), drawn(tokens, outputs, weight.dtype)
    whole = drawn(outputs, inputs, weight.main_grad.dtype)  # type: ignore[attr-defined]
    blocks = whole.clone()
    gemm(given, gradient, whole)
    for rows in parts(outputs, pieces):
        in_rows(gemm, given, gradient, blocks, rows)
    return torch.equal(whole, blocks)


def proven(tokens: int, linears: Mapping[LinearOf, Module], gemm_of: Callable[[Any], Gemm]) -> frozenset[Shape]:
    """The shapes of these linears that may be cut; warns of those that stay whole. `tokens`: rows of an input."""
    equal: dict[Shape, bool] = {}
    for linear, module in linears.items():
        if linear.pieces == 1 or linear.of_experts:
            continue
        (weight,) = weights_of(module)
        outputs, inputs = weight.shape
        if (shape := (tokens, inputs, outputs, linear.pieces)) not in equal:
            equal[shape] = equal_in_rows(gemm_of(weight.main_grad.dtype), weight, tokens, linear.pieces)  # type: ignore[attr-defined]
    if differing := [shape for shape, same in equal.items() if not same]:
        shapes = ", ".join(f"{outputs} x {inputs} in {pieces}" for _, inputs, outputs, pieces in differing)
        log.warning("weight gradients stay whole, because their pieces differ in bits on this device: %s", shapes)
    return frozenset(equal.keys() - differing)


def cut(gemm: Gemm, operands: tuple[Tensor, Tensor], out: Tensor, pieces: int, equal: Container[Shape]) -> Pieces | None:
    """The pieces of a weight gradient, or None if it stays whole. `equal`: the shapes that may be cut."""
    given, gradient = (operand.flatten(0, -2) for operand in operands)
    if (*given.shape, gradient.shape[-1], pieces) not in equal:
        return None
    blocks = enumerate(parts(len(out), pieces))
    return {piece: partial(in_rows, gemm, given, gradient, out, rows) for piece, rows in blocks}


def te_gemm(weight_gradient: Callable[..., Any]) -> tuple[Gemm, Tensor]:
    how: Mapping[str, Any] = inspect.getclosurevars(weight_gradient).nonlocals["wgrad_gemm_kwargs"]
    gemm = weight_gradient.__globals__["general_gemm"]
    return lambda given, gradient, out: gemm(given, gradient, **{**how, "out": out}), how["out"]


def te_gemm_alone() -> Gemm:
    from transformer_engine.pytorch.module import linear

    module: Any = linear
    needs_workspace = "workspace" in inspect.signature(module.general_gemm).parameters

    def gemm(given: Tensor, gradient: Tensor, out: Tensor) -> None:
        how = {"workspace": module.get_workspace()} if needs_workspace else {}
        module.general_gemm(given, gradient, **how, out_dtype=out.dtype, accumulate=True, layout="NT", out=out, grad=True)

    return gemm


def refused_pieces(place: str, module: Any, experts: int, pieces: int, *, fp8: bool) -> Iterator[Problem]:
    """Why a linear's weight gradient cannot be cut. `experts`: of this rank, if the linear is theirs, else 0."""
    if pieces == 1:
        return
    where, found = f"plan: weight_gradient_pieces of {place}", f"{pieces} pieces"
    if experts:
        if experts < pieces:
            yield Problem(where, found, f"at most {experts}, a rank's experts", "plan fewer pieces")
        if os.environ.get(ONE_KERNEL, "0") != "0":
            yield Problem(where, found, f"a GEMM for each expert, so {ONE_KERNEL} unset", TODO)
    elif fp8:
        yield Problem(where, found, "operands in 16 or 32 bits: FP8 scales are of whole operands", TODO)
    elif getattr(module, "apply_bias", False) and not getattr(module, "gemm_bias_unfused_add", True):
        yield Problem(where, found, "a GEMM of its own: this one makes the bias gradient, too", TODO)


def claims(engine: Engine, plan: Plan, run: LiveRun, linears: Mapping[LinearOf, Module]) -> Iterator[Claim]:
    tokens = plan.model.seq // run.context * plan.batch.micro
    yield from (_te_claims if run.uses_te else _local_claims)(engine.weight_gradients, tokens, linears)


def _local_claims(gradients: WeightGradients, tokens: int, linears: Mapping[LinearOf, Module]) -> Iterator[Claim]:
    from megatron.core.tensor_parallel import layers

    extension = layers.fused_weight_gradient_mlp_cuda
    gemms = {torch.float32: extension.wgrad_gemm_accum_fp32}
    equal = proven(tokens, linears, lambda dtype: gemms.get(dtype, extension.wgrad_gemm_accum_fp16))
    owners: Any = WeakIdKeyDictionary()
    """The linears by their `main_grad`; None for one of no linear here."""

    def owner_of(main_grad: Tensor) -> LinearOf | None:
        if main_grad not in owners:
            owners.update({module.weight.main_grad: of for of, module in linears.items()})  # type: ignore[union-attr]
        return owners.setdefault(main_grad, None)  # type: ignore[no-any-return]

    def accumulate(original: Any, total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        linear = owner_of(main_grad)
        if linear is None or not gradients.puts_off_or_catches_up(linear.linear):
            original(total_input, grad_output, main_grad)
            return
        operands = total_input.detach(), grad_output.detach()
        pieces = None if linear.of_experts else cut(original, operands, main_grad, linear.pieces, equal)
        whole = {linear.piece: partial(original, *operands, main_grad)}
        gradients.put_off(linear.linear, operands, pieces or whole)

    for name in ("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16"):
        yield Claim(extension, name, instead(accumulate), "adds a weight gradient to where it lies")


def _te_claims(gradients: WeightGradients, tokens: int, linears: Mapping[LinearOf, Module]) -> Iterator[Claim]:
    equal = proven(tokens, linears, lambda dtype: te_gemm_alone())
    for linear, module in linears.items():
        store = partial(Store, gradients=gradients, of=linear, module=module, equal=equal)
        yield Claim(module, "wgrad_store", store, "is asked whether to compute a weight gradient now", linear.place)


@dataclass(eq=False)
class Store:
    """Stands for the `WeightGradStore` of a linear of Transformer Engine's. `equal`: the shapes that may be cut."""

    original: Any
    gradients: WeightGradients
    of: LinearOf
    module: Any
    equal: Container[Shape] = ()

    def delay_wgrad_compute(self) -> bool:
        """In backward: whether the linear delays its weight gradient. In forward: True, because since 2.15 the store reaches
        backward only then."""
        in_forward = self.gradients.progress.in_backward_of is None
        return in_forward or self.gradients.puts_off_or_catches_up(self.of.linear)

    def put(self, tensor_list: Sequence[Any], func: Callable[..., tuple[Any, Any]]) -> None:
        operands = [
            map_nest(Tensor, lambda one: one.detach() if type(one) is Tensor else one, operand) for operand in tensor_list
        ]

        def compute() -> None:
            made = func(*operands)  # of a grouped linear, another tuple
            if self._makes_bias_gradient and (gradient := made[1]) is not None and gradient.numel():
                bias = self.module.bias
                bias.main_grad.add_(gradient.to(bias.dtype).view_as(bias))

        if self.gradients.puts_off_or_catches_up(self.of.linear):
            pieces = self._pieces(operands, func) if self.of.pieces > 1 else None
            self.gradients.put_off(self.of.linear, memory_of(operands[:2]), pieces or {self.of.piece: compute})
        else:
            compute()
        if self._makes_bias_gradient and type(operands[1]) is Tensor:
            self.module.bias.grad = torch.zeros_like(self.module.bias)  # DDP's hook needs one; adding zeros changes nothing

    def _pieces(self, operands: Sequence[Any], func: Callable[..., Any]) -> Pieces | None:
        """Pieces of a weight gradient that is cut; None if it stays whole. A grouped linear has lists of all experts."""
        if not self.of.of_experts:
            gemm, out = te_gemm(func)
            return cut(gemm, (operands[0], operands[1]), out, self.of.pieces, self.equal)
        if self.of.expert is not None:
            return None
        groups = enumerate(parts(len(operands[0]), self.of.pieces))
        return {piece: partial(func, *(operand[group] for operand in operands)) for piece, group in groups}

    @property
    def _makes_bias_gradient(self) -> bool:
        return bool(self.module.apply_bias and not self.module.gemm_bias_unfused_add)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)
