"""Gated attention by its shape: the usual attention's, and a linear h -> a d / t, its sigmoid, and a product of a d / t."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from megatron_lynx.anatomy import Item
from megatron_lynx.config.job import Job
from megatron_lynx.config.model import Model
from megatron_lynx.config.parallel import Parallel
from megatron_lynx.errors import Problem
from megatron_lynx.kinds.core_attention import core_tensors
from megatron_lynx.kinds.dense.planning import DenseAttention, queries_keys_values
from megatron_lynx.kinds.face import HalfParameters, Linear, Step
from megatron_lynx.kinds.saved import dropout_tensor, norm_tensors, row_parallel
from megatron_lynx.profiler.profile import SavedTensor
from megatron_lynx.profiler.roofline import Kernels
from megatron_lynx.profiler.shape import LayerShape

from .section import CORE, GATE, GATING, PROJECTION, QKV


class GatedAttention(DenseAttention):
    def linears(self, shape: LayerShape) -> Mapping[str, Linear]:
        gate = Linear(shape.tokens, shape.model.hidden, shape.query_width)
        return {GATE.name: gate, **super().linears(shape)}

    def kernels(self, shape: LayerShape, item: Item) -> Kernels:
        """Sigmoid, then the product; backward a product for each factor, then the sigmoid's."""
        one = self.attention(shape).query
        return Kernels((2 * one, 3 * one), (3 * one, 3 * one, 3 * one)) if item == GATING else super().kernels(shape, item)

    def saved(self, shape: LayerShape) -> Iterator[SavedTensor]:
        one = self.attention(shape).result
        yield from norm_tensors(shape, self.section, (GATE.name, QKV.name))
        yield SavedTensor(bytes=one, made_by=GATE.name, saved_by=(), output=True)
        yield from queries_keys_values(shape)
        yield from core_tensors(shape)
        yield SavedTensor(bytes=one, made_by=CORE.name, saved_by=(GATING.name,), output=True)
        yield SavedTensor(bytes=one, made_by=GATING.name, saved_by=(GATING.name,))  # the sigmoid
        yield SavedTensor(bytes=one, made_by=GATING.name, saved_by=(PROJECTION.name,))
        yield dropout_tensor(shape, self.section)

    def parameters(self, model: Model, layout: Parallel) -> HalfParameters:
        usual, weight = super().parameters(model, layout), model.hidden * model.query_width
        bias = model.query_width // layout.tensor if model.bias else 0
        return replace(
            usual, cut=usual.cut + weight, passed=usual.passed + weight, vectors=usual.vectors + bias, weights=3, biased=3
        )

    def backward(self, shape: LayerShape) -> Iterator[Step]:
        """The gate's linear is like `linear_qkv`: the most is in hand at one of the two."""
        one = self.attention(shape).result
        steps = list(super().backward(shape))
        yield from row_parallel(shape, self.section, one)
        yield Step(GATING.name, 3 * one, 2 * one)
        yield Step(GATE.name, shape.gathered_bytes, one)
        yield from steps[2:]

    def refusals(self, job: Job) -> Iterator[Problem]:
        if job.parallel.sequence_parallel:
            yield Problem("job: parallel.sequence_parallel", "true", "false with gated attention", "leave it out")
