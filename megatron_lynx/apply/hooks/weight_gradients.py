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
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils.weak import WeakIdKeyDictionary

from megatron_lynx.anatomy import EXPERTS_LINEARS, Half, Role
from megatron_lynx.anatomy.address import FrameKey
from megatron_lynx.apply.hook import Claim
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


class LinearOf(NamedTuple):
    layer: int
    half: Half
    item: str
    role: Role
    expert: int | None = None
    pieces: int = 1
    piece: int = 0
    """Which of these its expert is in, if experts run one by one."""

    @property
    def frame(self) -> FrameKey:
        return self.layer, self.half

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
                    linears[LinearOf(layer, section.half, item.name, item.role, expert, pieces, piece)] = module
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


@dataclass(frozen=True)
class Cutter:
    """Cuts the linears of one rank. `equal`: whether a shape in pieces is equal to the whole in every bit."""

    equal: dict[Shape, bool] = field(default_factory=dict)

    def prove(self, gemm: Gemm, weight: Tensor, tokens: int, pieces: int) -> None:
        """Compare the weight gradient of a shape whole and in blocks of rows. `weight`: has the `main_grad`."""
        outputs, inputs = weight.shape
        if (shape := (tokens, inputs, outputs, pieces)) in self.equal:
            return
        generator = torch.Generator(weight.device).manual_seed(0)

        def drawn(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
            return torch.randn(rows, columns, dtype=dtype, device=weight.device, generator=generator)

        given, gradient = drawn(tokens, inputs, weight.dtype), drawn(tokens, outputs, weight.dtype)
        whole = drawn(outputs, inputs, weight.main_grad.dtype)  # type: ignore[attr-defined]
        blocks = whole.clone()
        gemm(given, gradient, whole)
        for rows in parts(outputs, pieces):
            in_rows(gemm, given, gradient, blocks, rows)
        self.equal[shape] = torch.equal(whole, blocks)

    def say_whole(self) -> None:
        differing = [shape for shape, equal in self.equal.items() if not equal]
        if differing:
            shapes = ", ".join(f"{outputs} x {inputs} in {pieces}" for _, inputs, outputs, pieces in differing)
            log.warning("weight gradients stay whole, because their pieces differ in bits on this device: %s", shapes)

    def cut(
        self, gemm: Gemm, operands: tuple[Tensor, Tensor], out: Tensor, pieces: int
    ) -> dict[int, Callable[[], object]] | None:
        """The pieces of a weight gradient, or None if it stays whole."""
        given, gradient = (operand.flatten(0, -2) for operand in operands)
        if not self.equal.get((*given.shape, gradient.shape[-1], pieces), False):
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


def _cutter(plan: Plan, run: LiveRun, linears: Mapping[LinearOf, Module], gemm_of: Callable[[Any], Gemm]) -> Cutter:
    cutter = Cutter()
    for linear, module in linears.items():
        if linear.pieces > 1 and not linear.of_experts:
            (weight,) = weights_of(module)
            tokens = plan.model.seq // run.context * plan.batch.micro
            cutter.prove(gemm_of(weight.main_grad.dtype), weight, tokens, linear.pieces)  # type: ignore[attr-defined]
    cutter.say_whole()
    return cutter


def claims(engine: Engine, plan: Plan, run: LiveRun, linears: Mapping[LinearOf, Module]) -> Iterator[Claim]:
    from megatron.core.tensor_parallel import layers

    extension = layers.fused_weight_gradient_mlp_cuda
    gemms = {torch.float32: extension.wgrad_gemm_accum_fp32}
    cutter = _cutter(plan, run, linears, lambda dtype: gemms.get(dtype, extension.wgrad_gemm_accum_fp16))
    of_half: dict[FrameKey, dict[LinearOf, Module]] = defaultdict(dict)
    for linear, module in linears.items():
        of_half[linear.frame][linear] = module
    owners: dict[FrameKey, Any] = defaultdict(WeakIdKeyDictionary)  # cached: a half has as many linears as a rank has experts

    def owner_of(half: FrameKey | None, main_grad: Tensor) -> LinearOf | None:
        if half not in of_half:
            return None
        if main_grad not in owners[half]:
            having = (of for of, module in of_half[half].items() if getattr(module.weight, "main_grad", None) is main_grad)
            owners[half][main_grad] = next(having, None)
        return owners[half][main_grad]  # type: ignore[no-any-return]

    def hooked(original: Any) -> Any:
        @wraps(original)
        def accumulate(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
            gradients = engine.weight_gradients
            linear = owner_of(gradients.backward_of, main_grad)
            if linear is None:
                original(total_input, grad_output, main_grad)
            elif gradients.puts_off(linear.linear):
                operands = total_input.detach(), grad_output.detach()
                pieces = None if linear.of_experts else cutter.cut(original, operands, main_grad, linear.pieces)
                whole = {linear.piece: partial(original, *operands, main_grad)}
                gradients.put_off(linear.linear, operands, pieces or whole)
            else:
                gradients.catch_up(linear.linear)
                original(total_input, grad_output, main_grad)

        return accumulate

    for name in ("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16"):
        yield Claim(extension, name, hooked, "adds a weight gradient to where it lies")


def te_claims(engine: Engine, plan: Plan, run: LiveRun, linears: Mapping[LinearOf, Module]) -> Iterator[Claim]:
    cutter = _cutter(plan, run, linears, lambda dtype: te_gemm_alone())
    for linear, module in linears.items():

        def hooked(original: Any, linear: LinearOf = linear, module: Module = module) -> Any:
            return _Store(original, engine.weight_gradients, linear, module, cutter)

        yield Claim(module, "wgrad_store", hooked, "is asked whether to compute a weight gradient now", linear.place)


class _Store:
    def __init__(self, original: Any, gradients: WeightGradients, linear: LinearOf, module: Any, cutter: Cutter) -> None:
        self._original = original
        self._gradients = gradients
        self._half, self._linear = linear.frame, linear.linear
        self._of, self._cutter = linear, cutter
        self._module = module

    def delay_wgrad_compute(self) -> bool:
        """In backward: whether the linear delays its weight gradient. In forward: True, because since 2.15 the store reaches
        backward only then."""
        if self._gradients.backward_of != self._half:
            return True
        if self._gradients.puts_off(self._linear):
            return True
        self._gradients.catch_up(self._linear)
        return False

    def put(self, tensor_list: Sequence[Any], func: Callable[..., tuple[Any, Any]]) -> None:
        operands = [
            map_nest(Tensor, lambda one: one.detach() if type(one) is Tensor else one, operand) for operand in tensor_list
        ]

        def compute() -> None:
            made = func(*operands)  # of a grouped linear, another tuple
            if self._makes_bias_gradient and (gradient := made[1]) is not None and gradient.numel():
                bias = self._module.bias
                bias.main_grad.add_(gradient.to(bias.dtype).view_as(bias))

        if self._gradients.puts_off(self._linear):
            pieces = self._pieces(operands, func) if self._of.pieces > 1 else None
            self._gradients.put_off(self._linear, memory_of(operands[:2]), pieces or {self._of.piece: compute})
        else:
            self._gradients.catch_up(self._linear)
            compute()
        if self._makes_bias_gradient and type(operands[1]) is Tensor:
            self._module.bias.grad = torch.zeros_like(self._module.bias)  # DDP's hook needs one; adding zeros changes nothing

    def _pieces(self, operands: Sequence[Any], func: Callable[..., Any]) -> dict[int, Callable[[], object]] | None:
        """Pieces of a weight gradient that is cut; None if it stays whole. A grouped linear has lists of all experts."""
        if not self._of.of_experts:
            gemm, out = te_gemm(func)
            return self._cutter.cut(gemm, (operands[0], operands[1]), out, self._of.pieces)
        if self._of.expert is not None:
            return None
        groups = enumerate(parts(len(operands[0]), self._of.pieces))
        return {piece: partial(func, *(operand[group] for operand in operands)) for piece, group in groups}

    @property
    def _makes_bias_gradient(self) -> bool:
        return bool(self._module.apply_bias and not self._module.gemm_bias_unfused_add)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def puts_off_gathered(engine: Engine, linears: Iterable[LinearOf]) -> Callable[[], bool]:
    """Whether the present gather may feed a delayed weight gradient. Row-parallel linears gather no input. Several of latent
    attention cannot be distinguished here: if one of them delays, none uses the global buffer."""
    of_half: dict[FrameKey, list[Linear]] = defaultdict(list)
    for linear in linears:
        if linear.role != "row_parallel":
            of_half[linear.frame].append(linear.linear)

    def puts_off() -> bool:
        half = engine.weight_gradients.backward_of
        return half is not None and any(map(engine.weight_gradients.puts_off, of_half.get(half, ())))

    return puts_off
