"""Runs output projection and loss in pieces of the sequence.

Replaces              `_postprocess` and `compute_language_model_loss` of the GPTModel that has the head, and `forward` of its
                      `output_layer`.
Why                   the logits of a whole micro-batch, in fp32 and in the model's type, are the last stage's largest tensors.
Calls the original    `_postprocess` once per call; the loss once per piece, and again in backward; the projection's
                      `_forward_impl` as often, without collectives: its input is gathered, and its gradient reduced, once
                      for all pieces.
Holds                 the number of pieces; while `_postprocess` runs, whether labels were given.
Passes through when   no labels are given: logits are requested.

Settings that use logits or their gradients otherwise are refused, and heads that are not Megatron's own. Logits are computed
twice: one GEMM more. The weight's gradient is summed in another order than without pieces.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Module

from megatron_lynx.apply.hook import Claim, instead
from megatron_lynx.apply.live_run import LiveRun, name_of
from megatron_lynx.errors import HookRefused, Problem
from megatron_lynx.limits import refused
from megatron_lynx.plan.plan import Plan

log = logging.getLogger(__name__)


def claims(chunk: Module, pieces: int) -> Iterator[Claim]:
    head = _Head(chunk, pieces)
    yield Claim(chunk, "_postprocess", instead(head.postprocess), "says whether a loss is wanted, or logits", "model")
    yield Claim(chunk.output_layer, "forward", instead(head.project), "would make all logits at once", "output_layer")
    yield Claim(chunk, "compute_language_model_loss", instead(head.loss), "computes the loss of a piece", "model")


@dataclass(frozen=True)
class _Unprojected:
    hidden_SBH: Tensor
    weight_VH: Tensor


class _Head:
    def __init__(self, chunk: Any, pieces: int) -> None:
        self._projection = chunk.output_layer
        self._pieces = pieces
        self._wants_loss = self._is_warned = False

    def postprocess(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("labels") is None:
            return original(*args, **kwargs)
        _check_call(kwargs, self._projection)
        self._wants_loss = True
        try:
            return original(*args, **kwargs)
        finally:
            self._wants_loss = False

    def project(self, original: Any, input_: Tensor, weight: Tensor | None = None, **kwargs: Any) -> Any:
        if not self._wants_loss:
            if input_.requires_grad and not self._is_warned:
                self._is_warned = True
                log.warning("the head runs whole, not in the plan's pieces: its logits are requested (LogitsInPieces)")
            return original(input_, weight, **kwargs)
        return _Unprojected(input_, self._projection.weight if weight is None else weight), None

    def loss(self, original: Any, labels: Tensor, logits: Tensor | _Unprojected) -> Any:
        if not isinstance(logits, _Unprojected):
            return original(labels, logits)

        def loss_of(rows_SBH: Tensor, weight_VH: Tensor, labels_BS: Tensor) -> Any:
            return original(labels_BS, self.logits(rows_SBH, weight_VH))

        return self.in_pieces(self.shared(logits.hidden_SBH), logits.weight_VH, loss_of, labels)

    def in_pieces(self, rows_SBH: Tensor, weight_VH: Tensor, loss_of: LossOfRows, *labels_BS: Tensor) -> Tensor:
        """The losses (..., B, S) of all tokens, computed in pieces of the sequence; the last one may be shorter."""
        fused = self._projection.gradient_accumulation_fusion  # then backward adds to `main_grad`, and returns a dummy
        losses: Tensor = _LossInPieces.apply(rows_SBH, weight_VH, self._pieces, loss_of, fused, *labels_BS)  # type: ignore[no-untyped-call]
        return losses

    def logits(self, rows_SBH: Tensor, weight_VH: Tensor) -> Any:
        """This rank's part of the vocabulary, without a collective in either pass."""
        return self._projection._forward_impl(
            input=rows_SBH,
            weight=weight_VH,
            bias=None,
            gradient_accumulation_fusion=self._projection.gradient_accumulation_fusion,
            allreduce_dgrad=False,
            sequence_parallel=False,
            tp_group=self._projection.tp_group,
        )

    def shared(self, hidden_SBH: Tensor) -> Any:
        """All rows, on every tensor-parallel rank; backward sums the gradients of the ranks' vocabularies."""
        from megatron.core.tensor_parallel import mappings

        group = self._projection.tp_group
        if self._projection.sequence_parallel:
            return mappings.gather_from_sequence_parallel_region(hidden_SBH, group=group)
        return mappings.copy_to_tensor_model_parallel_region(hidden_SBH, group=group)


Losses = Callable[..., Mapping[str, Tensor]]
"""From logits (B, S, V of this rank) in fp32 and tensors (B, S) by name, such as labels, to values (B, S) by name."""


class LogitsInPieces(ExitStack):
    """Computes a frontend's functions of logits, such as log-probabilities and entropy, in pieces of the sequence.

        with LogitsInPieces(model, 8) as in_pieces:
            hidden = model(...)                                   the output layer's input (B, S, H) instead of logits
        values = in_pieces(function)(hidden, labels=labels)       function(logits, labels=labels), piece by piece

    Without an output layer `model` is unchanged. Raises `HookRefused` for an output layer that cannot run in pieces.
    """

    def __init__(self, model: Module, pieces: int) -> None:
        chunks: Iterator[Any] = (
            one for one in model.modules() if getattr(one, "post_process", False) and hasattr(one, "output_layer")
        )
        super().__init__()
        if (chunk := next(chunks, None)) is None:
            return
        if problems := list(_another_projection(chunk)):
            raise HookRefused("the output layer cannot run in pieces", problems)
        projection = chunk.output_layer
        self._head, self._weight_VH = _Head(chunk, pieces), projection.weight

        def unprojected(original: Any, input_: Tensor, weight: Tensor | None = None, **kwargs: Any) -> Any:
            if kwargs.get("runtime_gather_output"):
                return original(input_, weight, **kwargs)
            self._weight_VH = projection.weight if weight is None else weight
            rows_SBH = self._head.shared(input_)
            if rows_SBH.requires_grad:  # Megatron's all-reduce leaves a strided gradient as it is
                rows_SBH.register_hook(Tensor.contiguous)
            return rows_SBH, None

        hook = Claim(projection, "forward", instead(unprojected), "returns logits")
        hook.place()
        self.callback(hook.restore)

    def __call__(self, function: Losses) -> Losses:
        def values_of(hidden_BSH: Tensor, **labels_BS: Tensor) -> dict[str, Tensor]:
            names: list[str] = []

            def stacked(rows_SBH: Tensor, weight_VH: Tensor, *labels: Tensor) -> Tensor:
                logits_BSV = self._head.logits(rows_SBH, weight_VH).transpose(0, 1).contiguous().float()
                values = function(logits_BSV, **dict(zip(labels_BS, labels, strict=True)))
                names[:] = values
                return torch.stack([*values.values()])

            rows_SBH = hidden_BSH.transpose(0, 1).to(self._weight_VH.dtype)
            results = self._head.in_pieces(rows_SBH, self._weight_VH, stacked, *labels_BS.values())
            return dict(zip(names, results, strict=True))

        return values_of

    remove = ExitStack.close


UNKNOWN = ("runtime_gather_output", "output_processor", "inference_context", "inference_params")
"""Arguments of a call with labels that need the whole vocabulary on every rank, or all logits."""


def _check_call(given: Mapping[str, Any], projection: Module) -> None:
    todo = "train without it, or with a plan whose head is whole"
    problems = [Problem(f"model: {name}", "given", "none", todo) for name in UNKNOWN if given.get(name)]
    problems += [Problem("output_layer.forward_hooks", name, "none", todo) for name in readers_of_logits(projection)]
    if problems:
        raise HookRefused("this call of the head cannot run in pieces", problems)


WHOLE = "plan without a head in pieces (head)"

PROJECTION = "megatron.core.tensor_parallel.layers.ColumnParallelLinear"
_MODEL = "megatron.core.models.gpt.gpt_model.GPTModel"
_LANGUAGE = "megatron.core.models.common.language_module.language_module.LanguageModule"
KNOWN = {"forward": _MODEL, "_postprocess": _MODEL, "_scale_logits": _LANGUAGE, "compute_language_model_loss": _LANGUAGE}
"""Methods that must be Megatron's own, with their classes. Releases before 0.17 have no `_scale_logits`."""


def refused_head(plan: Plan, run: LiveRun) -> Iterator[Problem]:
    if plan.head is None:
        return
    yield from refused(run.config, ["head"])
    if (chunk := head_chunk(run)) is None:
        return
    for method, owner in KNOWN.items():
        code, known = getattr(chunk, method, None), f"{owner}.{method}"
        found = f"{getattr(code, '__module__', '')}.{getattr(code, '__qualname__', name_of(code))}"
        if code is not None and found != known:
            yield Problem(f"model.{method}", found, f"{known} with a head in pieces", f"train Megatron's, or {WHOLE}")
    yield from _another_projection(chunk)


def readers_of_logits(projection: Module) -> list[str]:
    return [getattr(hook, "__qualname__", name_of(hook)) for hook in projection._forward_hooks.values()]


def head_chunk(run: LiveRun) -> Any:
    return run.chunks[-1] if getattr(run.chunks[-1], "post_process", False) else None


def _another_projection(chunk: Any) -> Iterator[Problem]:
    projection = chunk.output_layer
    if (class_name := name_of(projection)) != PROJECTION:
        yield Problem("output_layer", class_name, f"{PROJECTION} with a head in pieces", WHOLE)
        return
    for reader in readers_of_logits(projection):
        drop = "drop what reads logits, such as --logits-load-dir, --logits-save-dir or --save-activations-interval"
        yield Problem("output_layer.forward_hooks", reader, "none with a head in pieces", f"{drop}; or {WHOLE}")
    weight = chunk.shared_embedding_or_output_weight() if chunk.share_embeddings_and_output_weights else projection.weight
    needed = {
        "bias": (projection.bias is not None, False),
        "gather_output": (projection.gather_output, False),
        "explicit_expert_comm": (projection.explicit_expert_comm, False),
        "output_dtype": (getattr(projection, "output_dtype", None), None),  # since 0.20: --output-logit-dtype
        "weight.requires_grad": (weight.requires_grad, True),
    }
    for name, (setting, wanted) in needed.items():
        if setting != wanted:
            yield Problem(f"output_layer.{name}", str(setting), f"{wanted} with a head in pieces", WHOLE)


LossOfRows = Callable[..., Tensor]
"""From rows of the input (S, B, H), the weight (V, H) and labels (each B, S) to losses (..., B, S). Rows must not depend on each
other."""


class _LossInPieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input_SBH: Tensor,
        weight_VH: Tensor,
        pieces: int,
        loss_of: LossOfRows,
        adds_in_place: bool,
        *labels_BS: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(input_SBH, *labels_BS)
        ctx.weight = weight_VH  # saved tensors lose a parameter's identity under hooks (rule R11)
        ctx.loss_of, ctx.adds_in_place = loss_of, adds_in_place
        ctx.rows = -(-len(input_SBH) // pieces)
        rows = zip(input_SBH.split(ctx.rows), *(labels.split(ctx.rows, dim=1) for labels in labels_BS), strict=True)
        return torch.cat([loss_of(part, weight_VH, *labels) for part, *labels in rows], dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BS: Tensor) -> tuple[Tensor | None, ...]:
        input_SBH, *labels_BS = ctx.saved_tensors
        input_gradient, total = torch.empty_like(input_SBH), None
        labels_of_rows = (labels.split(ctx.rows, dim=1) for labels in labels_BS)
        split = (input_SBH.split(ctx.rows), gradient_BS.split(ctx.rows, dim=-1), input_gradient.split(ctx.rows))
        for part, gradient, result, *labels in zip(*split, *labels_of_rows, strict=True):
            with torch.enable_grad():
                leaf = part.detach().requires_grad_()
                losses = ctx.loss_of(leaf, ctx.weight, *labels)
            if ctx.adds_in_place:
                total = None  # free the previous dummy before the next one is made
            of_rows, of_weight = torch.autograd.grad(losses, (leaf, ctx.weight), gradient, allow_unused=True)
            result.copy_(of_rows)
            if of_weight is None or ctx.adds_in_place:
                total = of_weight
            else:
                total = of_weight.float() if total is None else total.add_(of_weight)
            del losses, of_rows, of_weight
        return input_gradient, None if total is None else total.to(ctx.weight.dtype), *[None] * (3 + len(labels_BS))
