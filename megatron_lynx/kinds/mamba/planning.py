"""Planning of a Mamba-2 layer.

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

from collections.abc import Iterator

from megatron_lynx.config.model import Model
from megatron_lynx.config.parallel import Parallel
from megatron_lynx.kinds.face import HalfParameters, Step
from megatron_lynx.kinds.mamba.section import GATED_NORM, IN_PROJ, SCAN, MambaSizes
from megatron_lynx.kinds.mixer import TokenMixer, column_bytes
from megatron_lynx.kinds.saved import column_parallel, dropout_tensor, norm_tensors, row_parallel
from megatron_lynx.kinds.section import Item
from megatron_lynx.profiler.profile import SavedTensor, own_tensors
from megatron_lynx.profiler.roofline import Kernels, Roofline
from megatron_lynx.profiler.shape import FP32_BYTES, LayerShape
from megatron_lynx.timeline import Passes

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
        yield from norm_tensors(shape, self.section, (IN_PROJ,))
        yield SavedTensor(bytes=one * sizes.made, made_by=IN_PROJ, saved_by=(SCAN,) if alone else (), output=True)
        decay = FP32_BYTES * sizes.heads // shape.parallel.tensor
        yield from own_tensors(SCAN, inner, decay, decay, *[] if alone else [one * sizes.made])
        yield SavedTensor(bytes=inner, made_by=SCAN, saved_by=(GATED_NORM,))
        yield from own_tensors(GATED_NORM, FP32_BYTES * shape.tokens * sizes.groups // shape.parallel.tensor)
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
            largest=model.hidden * sizes.made,
        )

    def backward(self, shape: LayerShape) -> Iterator[Step]:
        """The scan's own gradients are counted as if none was freed before its end."""
        sizes, one = self.sizes(shape.model), column_bytes(shape)
        inner, convolved, made = (one * columns for columns in (sizes.inner, sizes.convolved, sizes.made))
        states = 3 * FP32_BYTES * (shape.tokens // shape.parallel.tensor) * sizes.inner * sizes.state // CHUNK
        yield from row_parallel(shape, self.section, inner)
        yield Step(GATED_NORM, inner, inner)
        inside = 2 * convolved + states
        yield Step(SCAN, inside + made, inside + inner)
        yield from column_parallel(shape, self.section, made)


def scan_flops(sizes: MambaSizes) -> int:
    return sizes.heads * (2 * CHUNK * sizes.size + 4 * sizes.state * sizes.size) + 2 * sizes.groups * CHUNK * sizes.state
