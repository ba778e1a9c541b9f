"""Planning of halves that mix tokens without attention: a Mamba-2 layer, and a gated delta net (`DeltaNet`).

Widths on one rank: d result, m output of the first linear, c convolved columns (`MambaSizes`); a heads of p, G groups of states
of N. C = 128 tokens are a chunk of the scan. Columns of what backward reads, by the item that makes it:

    mamba_in_proj    m       read by the scan's backward, which repeats the convolution and the states
    mamba_scan       d, d    result before the gate, and after: the norm's input
    mamba_norm       d       and a statistic per group; input of the last linear

Scan per token, forward: FLOPs a (2Cp + 4Np) + 2GCN; it moves 5c + 3d columns, states of p N / C per head four times in fp32, and
scores of C per group twice. Backward repeats convolution and states, with twice the products: 3 times the FLOPs, and 9c + 13d
columns, ten times the states and six times the scores. A forward is within 15 % of Triton's kernels on an H100 (vLLM, pull
request 27299).

Sources: `MambaMixer._ssm_training` of megatron-core 0.16 to 0.19; `MambaSplitConv1dScanCombinedFn` and `RMSNorm` of mamba_ssm.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping

from megatron_lynx.config.job import Job
from megatron_lynx.config.model import Model
from megatron_lynx.config.parallel import Parallel
from megatron_lynx.errors import Problem
from megatron_lynx.kinds.face import HalfParameters, Linear, Planning, Step
from megatron_lynx.kinds.mamba.section import CONVOLUTION, GATED_NORM, MAMBA_NORM, RULE, SCAN, DeltaSizes, MambaSizes
from megatron_lynx.kinds.saved import column_parallel, dropout_tensor, norm_blocks, norm_tensors, row_parallel
from megatron_lynx.kinds.section import Item
from megatron_lynx.profiler.profile import SavedTensor, own_tensors
from megatron_lynx.profiler.roofline import Kernels, Roofline
from megatron_lynx.profiler.shape import FP32_BYTES, LayerShape, saved_bytes
from megatron_lynx.timeline import Passes


class TokenMixer(Planning):
    @abstractmethod
    def sizes(self, model: Model) -> DeltaSizes | MambaSizes: ...

    def linears(self, shape: LayerShape) -> Mapping[str, Linear]:
        sizes, hidden, tensor = self.sizes(shape.model), shape.model.hidden, shape.parallel.tensor
        return {
            self.section.column_parallel: Linear(shape.tokens, hidden, sizes.made // tensor),
            self.section.row_parallel: Linear(shape.tokens, sizes.result // tensor, hidden),
        }

    def output_bytes(self, shape: LayerShape, item: Item) -> int:
        if item.role != "kernel":
            return super().output_bytes(shape, item)
        return column_bytes(shape) * self.sizes(shape.model).result

    def result_tensors(self, shape: LayerShape, *, output: bool = True) -> Iterator[SavedTensor]:
        """Yield the input of the last linear, which in FP8 saves a tensor more. `output`: whether a site returned it."""
        section, columns, recipe = self.section, self.sizes(shape.model).result, shape.model.fp8_recipe
        readers = (section.row_parallel,) if recipe is None else ()
        size, made_by = column_bytes(shape) * columns, section.before_row_parallel
        yield SavedTensor(bytes=size, made_by=made_by, saved_by=readers, output=output)
        if recipe is not None:
            yield from own_tensors(section.row_parallel, saved_bytes(recipe, shape.tokens, columns // shape.parallel.tensor))

    def refusals(self, job: Job) -> Iterator[Problem]:
        if job.parallel.context > 1:
            needed = f"1 with {self.section.name}: it exchanges heads for tokens, which is not counted"
            yield Problem("job: parallel.context", str(job.parallel.context), needed, "stock policies can be estimated")
        for name, count in self.sizes(job.model).shared.items():
            if count % job.parallel.tensor:
                needed = f"a multiple of parallel.tensor ({job.parallel.tensor}), whose ranks share them"
                yield Problem(f"job: model.opaque: {self.section.name}: {name}", str(count), needed)


def column_bytes(shape: LayerShape) -> int:
    """Return the bytes of one of the columns that tensor-parallel ranks share, on one of them."""
    return shape.tokens * shape.model.element_bytes // shape.parallel.tensor


CHUNK = 128
CONVOLVED = 4
"""Width of the convolution in tokens."""


class MambaLayer(TokenMixer):
    def sizes(self, model: Model) -> MambaSizes:
        sizes = model.opaque_in(self.section).mamba
        assert sizes is not None, "a Mamba layer has them"
        return sizes

    def kernels(self, shape: LayerShape, item: Item) -> Kernels:
        inner = column_bytes(shape) * self.sizes(shape.model).inner
        return Kernels((2 * inner,), (3 * inner,))

    def seconds(self, shape: LayerShape, item: Item, roof: Roofline) -> Passes:
        if item.name != SCAN:
            return super().seconds(shape, item, roof)
        sizes, tokens, one = self.sizes(shape.model), shape.tokens / shape.parallel.tensor, column_bytes(shape)
        states = FP32_BYTES * tokens * sizes.inner * sizes.state / CHUNK
        scores, flops = FP32_BYTES * tokens * sizes.groups * CHUNK, tokens * scan_flops(sizes)
        moved = one * (5 * sizes.convolved + 3 * sizes.inner) + 4 * states + 2 * scores
        moved_back = one * (9 * sizes.convolved + 13 * sizes.inner) + 10 * states + 6 * scores
        return Passes(roof.seconds(flops, moved), roof.seconds(3 * flops, moved_back))

    def saved(self, shape: LayerShape) -> Iterator[SavedTensor]:
        sizes, one = self.sizes(shape.model), column_bytes(shape)
        inner, alone = one * sizes.inner, shape.micro == 1  # else sequences come one after the other, in copies
        first = self.section.column_parallel
        yield from norm_tensors(shape, self.section, (first,))
        yield SavedTensor(bytes=one * sizes.made, made_by=first, saved_by=(SCAN,) if alone else (), output=True)
        decay = FP32_BYTES * sizes.heads // shape.parallel.tensor
        yield from own_tensors(SCAN, inner, decay, decay, *[] if alone else [one * sizes.made])
        yield SavedTensor(bytes=inner, made_by=SCAN, saved_by=(MAMBA_NORM,))
        yield from own_tensors(MAMBA_NORM, FP32_BYTES * shape.tokens * sizes.groups // shape.parallel.tensor)
        yield from self.result_tensors(shape)
        yield dropout_tensor(shape, self.section)

    def parameters(self, model: Model, layout: Parallel) -> HalfParameters:
        """Besides two linears: the convolution and its bias, decay, step and shortcut of each head, and the inner norm."""
        sizes = self.sizes(model)
        matrices, convolved = model.hidden * (sizes.made + sizes.inner), CONVOLVED * sizes.convolved
        return HalfParameters(
            cut=matrices + convolved + sizes.convolved + 3 * sizes.heads + sizes.inner,
            passed=matrices + convolved + scan_flops(sizes) // 2,
            vectors=model.norm_parameters(),
            weights=8,
            biased=0,
        )

    def backward(self, shape: LayerShape) -> Iterator[Step]:
        """The scan's own gradients are counted as if none was freed before its end."""
        sizes, one = self.sizes(shape.model), column_bytes(shape)
        inner, convolved, made = (one * columns for columns in (sizes.inner, sizes.convolved, sizes.made))
        states = 3 * FP32_BYTES * (shape.tokens // shape.parallel.tensor) * sizes.inner * sizes.state // CHUNK
        yield from row_parallel(shape, self.section, inner)
        yield Step(MAMBA_NORM, inner, inner)
        inside = 2 * convolved + states
        yield Step(SCAN, inside + made, inside + inner)
        yield from column_parallel(shape, self.section, made)


def scan_flops(sizes: MambaSizes) -> int:
    """Return the scan's forward FLOPs per token, over all tensor-parallel ranks."""
    return sizes.heads * (2 * CHUNK * sizes.size + 4 * sizes.state * sizes.size) + 2 * sizes.groups * CHUNK * sizes.state


RULE_CHUNK = 64
RULE_FLOP_PER_S = (105e12, 83e12)
"""Rates of the rule's kernels, forward and backward. They are alike on an H200 and a GB200: neither memory nor matrix units bound
them (flash-linear-attention 0.5.1 in benchmark_results_H200.txt and benchmark_results_GB200.txt of QwenLM/FlashQLA)."""

EAGER_FLOATS = 112_193
"""fp32 values that the rule in eager operators (deterministic mode) saves per chunk and head, besides 7k' + 3v' per token and one
state: measured to 2 % on a CPU. Most are rows of the chunk's triangular solution, of which each of 63 saves all before it."""


class DeltaNet(TokenMixer):
    """Widths on one rank: k keys, v values, m output of the first linear (`DeltaSizes`), r keys repeated for a value heads of k',
    v'. C = 64 tokens are a chunk of the delta rule. Columns of what backward reads, by the item that makes it:

        delta_in_proj       m               read by the convolution, which saves a view of it
        delta_convolution   2k, 2r, v, v    normed queries and keys, the same repeated, values, gate; per head norms, decay, step
        delta_rule          C a, v          solved scores of a chunk; result. States of chunks are recomputed in backward
        delta_norm          v, v            normed result; its product with the gate, input of the last linear

    Delta rule per token and head, forward: FLOPs of keys with keys and queries 4Ck', of scores with keys and values 2Ck' + 4Cv',
    of states 6k'v'; it moves 7k' + 6v' columns, scores in fp32 and after, and states k'v'/C twice. Backward repeats keys, values
    and states (2Ck' + 2Cv' + 4k'v' FLOPs), and moves 21k' + 15v' columns and four times the states.

    Sources: `GatedDeltaNet.forward` of megatron-core 0.18 and 0.19; `ChunkGatedDeltaRuleFunction`, `L2NormFunction` and
    `causal_conv1d` of flash-linear-attention. In deterministic mode Megatron runs convolution and rule in eager operators.
    """

    def sizes(self, model: Model) -> DeltaSizes:
        sizes = model.opaque_in(self.section).delta
        assert sizes is not None, "a gated delta net has them"
        return sizes

    def kernels(self, shape: LayerShape, item: Item) -> Kernels:
        sizes, one = self.sizes(shape.model), column_bytes(shape)
        keys, values, convolved = one * sizes.keys, one * sizes.values, one * (2 * sizes.keys + sizes.values)
        if item.name == GATED_NORM:
            return Kernels((2 * values, 3 * values), (5 * values, 3 * values))
        repeated = 2 * keys + 2 * one * sizes.repeated
        forward = (2 * convolved, 4 * keys, 4 * keys, repeated, 2 * values, 2 * values)
        return Kernels(forward, (repeated, 6 * keys, 2 * convolved, 5 * convolved, 2 * one * sizes.made))

    def seconds(self, shape: LayerShape, item: Item, roof: Roofline) -> Passes:
        if item.name != RULE:
            return super().seconds(shape, item, roof)
        sizes = self.sizes(shape.model)
        heads = shape.tokens * sizes.value_heads / shape.parallel.tensor
        key, value, element = sizes.key_size, sizes.value_size, shape.model.element_bytes
        states, scores = key * value / RULE_CHUNK, RULE_CHUNK * (2 * element + 2 * FP32_BYTES)
        flops, again = rule_flops(sizes), 2 * RULE_CHUNK * (key + value) + 4 * key * value
        moved = element * (7 * key + 6 * value + 2 * states) + scores
        moved_back = element * (21 * key + 15 * value + 4 * states + 2 * RULE_CHUNK)
        if shape.model.deterministic:  # written and read, then read with gradients
            moved, moved_back = 2 * eager_bytes(sizes), 4 * eager_bytes(sizes)
        forward_s, backward_s = heads * flops / RULE_FLOP_PER_S[0], heads * (2 * flops + again) / RULE_FLOP_PER_S[1]
        return Passes(
            max(forward_s, roof.seconds(heads * flops, heads * moved)),
            max(backward_s, roof.seconds(heads * (2 * flops + again), heads * moved_back)),
        )

    def saved(self, shape: LayerShape) -> Iterator[SavedTensor]:
        model, sizes, one = shape.model, self.sizes(shape.model), column_bytes(shape)
        values, heads = one * sizes.values, shape.tokens * sizes.value_heads // shape.parallel.tensor
        first = self.section.column_parallel
        yield from norm_tensors(shape, self.section, (first,))
        eager, convolved = model.deterministic, one * (2 * sizes.keys + sizes.values)
        yield SavedTensor(bytes=one * sizes.made, made_by=first, saved_by=() if eager else (CONVOLUTION,), output=True)
        yield from own_tensors(CONVOLUTION, *[convolved, convolved] if eager else [])
        norms = FP32_BYTES * 2 * shape.tokens * sizes.key_heads // shape.parallel.tensor
        of_heads = model.element_bytes * sizes.value_heads // shape.parallel.tensor
        decay = [*[FP32_BYTES * heads] * 2, of_heads, of_heads] if shape.eager else [model.element_bytes * heads]
        yield from own_tensors(CONVOLUTION, 2 * one * sizes.keys, norms, *decay)
        step = (CONVOLUTION,) if eager else (CONVOLUTION, RULE)
        yield SavedTensor(bytes=model.element_bytes * heads, made_by=CONVOLUTION, saved_by=step)
        for size in (one * sizes.repeated, one * sizes.repeated, values):
            yield SavedTensor(bytes=size, made_by=CONVOLUTION, saved_by=() if eager else (RULE,))
        yield SavedTensor(bytes=values, made_by=CONVOLUTION, saved_by=(GATED_NORM,))  # gate
        kernels = [FP32_BYTES * heads, model.element_bytes * heads * RULE_CHUNK]
        yield from own_tensors(RULE, *[round(heads * eager_bytes(sizes))] if eager else kernels)
        yield SavedTensor(bytes=values, made_by=RULE, saved_by=(GATED_NORM,), output=True)
        yield from own_tensors(GATED_NORM, *_gated_norm(shape, values, heads))
        yield from self.result_tensors(shape, output=shape.micro == 1)  # else copied into order
        yield dropout_tensor(shape, self.section)

    def parameters(self, model: Model, layout: Parallel) -> HalfParameters:
        """The convolution, decay and step have weights of their own; no linear has a bias."""
        sizes = self.sizes(model)
        matrices, convolved = model.hidden * (sizes.made + sizes.values), sizes.convolved * (2 * sizes.keys + sizes.values)
        return HalfParameters(
            cut=matrices + convolved + 2 * sizes.value_heads,
            passed=matrices + convolved + sizes.value_heads * rule_flops(sizes) // 2,
            vectors=model.norm_parameters() + model.norm_parameters(sizes.value_size),
            weights=5,
            biased=0,
            norms=2,
        )

    def backward(self, shape: LayerShape) -> Iterator[Step]:
        """The rule's own gradients are counted as if none was freed before its end."""
        sizes, one = self.sizes(shape.model), column_bytes(shape)
        keys, repeated, values, made = (one * columns for columns in (sizes.keys, sizes.repeated, sizes.values, sizes.made))
        yield from row_parallel(shape, self.section, values)
        within = 4 * values * FP32_BYTES // shape.model.element_bytes if shape.eager else 0
        yield Step(GATED_NORM, 3 * values + within, 2 * values + within)
        inside = 5 * (repeated + values) + 2 * one * sizes.repeated * sizes.value_size // RULE_CHUNK
        yield Step(RULE, inside, inside - 2 * repeated)
        between = 8 * keys + 2 * values
        yield Step(CONVOLUTION, between + made, between + 2 * repeated + 2 * values)
        yield from column_parallel(shape, self.section, made)


def eager_bytes(sizes: DeltaSizes) -> float:
    """Return the bytes that the rule in eager operators saves per token and head."""
    key, value = sizes.key_size, sizes.value_size
    return FP32_BYTES * ((EAGER_FLOATS + key * value) / RULE_CHUNK + 7 * key + 3 * value)


def rule_flops(sizes: DeltaSizes) -> int:
    """Return the rule's forward FLOPs per token and value head."""
    key, value = sizes.key_size, sizes.value_size
    return 6 * RULE_CHUNK * key + 4 * RULE_CHUNK * value + 6 * key * value


def _gated_norm(shape: LayerShape, values: int, heads: int) -> list[int]:
    """Bytes that the norm and the product with the gate save besides arguments: compiled code recomputes its activation."""
    element = shape.model.element_bytes
    exact = [values // element * FP32_BYTES] * (1 if element == FP32_BYTES else 2) if shape.eager else []
    return [*norm_blocks(shape, heads, values), values, *exact]
