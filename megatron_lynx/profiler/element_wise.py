"""Bytes that operations between GEMMs read and write, as one fused kernel or as several.

    fused      arguments ──> [ one kernel ] ──> result                     every tensor is read or written once
    unfused    arguments ──> [ + bias ] ──> [ SiLU ] ──> [ x ] ──> result  intermediates are also written and read

The launch sets Megatron's fusions (`model.fusions`). A kernel costs its bytes and its start and end (`roofline`). Recomputations
run the same kernels as forward.

    O: output bytes of the activation; I: its input; R: residual stream; S: scores; T: queries or keys with rotary positions
                                     fused                  unfused
    activation, GELU           fwd   I + O                  gelu 2 O                        with a bias: + 2 I
                               bwd   I + O + I              3 O
    activation, SwiGLU         fwd   I + O                  SiLU 2 O, offset 2 O, product 3 O
                               bwd   I + O + I              two products 6 O, SiLU 3 O, concatenation of both halves 4 O
    bias, dropout, residual    fwd   3 R, mask              bias 2 R, dropout 2 R, mask, sum 3 R
    softmax of masked scores   fwd   2 S                    mask 2 S, softmax 2 S
                               bwd   3 S                    product 3 S, softmax 3 S, copy 2 S, mask 2 S
    rotary positions           fwd   2 T                    12 T, and sine and cosine, which every layer recomputes
                               bwd   2 T                    14 T

In both cases the gradient of the residual connection is added to the half's. Bias gradients (sums over rows) are the same in both
and left out, as with linears. A norm counts as one kernel with `--no-persist-layer-norm` too: its second read hits a cache. Fused
losses are in `analytic.LOSS_BYTES`.

Read in megatron-core 0.16.1 (`fused_bias_dropout.py`, `fused_bias_swiglu.py`, `mlp.py`, `rope_utils.py`, `fused_softmax.py`);
tests count its operators. The split into CUDA kernels is from a profile of an H100.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_lynx.config.model import Model
from megatron_lynx.profiler.shape import FP32_BYTES, MASK_BYTES, LayerShape

KERNEL_KEYS = range(17, 4097)
"""Sequence lengths that Megatron's softmax kernel supports (`FusedScaleMaskSoftmax.is_kernel_available`)."""
KERNEL_BATCHES = 4
"""Required divisor of heads x sequences for that kernel."""


class Kernels(NamedTuple):
    """Bytes moved by each kernel."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]

    def __add__(self, other: tuple[object, ...]) -> Kernels:
        assert isinstance(other, Kernels), "kernels are added to kernels"
        return Kernels(self.forward + other.forward, self.backward + other.backward)


def one_kernel(forward: int, backward: int) -> Kernels:
    return Kernels(tuple(moved for moved in (forward,) if moved), tuple(moved for moved in (backward,) if moved))


def norm_kernels(shape: LayerShape) -> Kernels:
    return one_kernel(2 * shape.input_bytes, 3 * shape.input_bytes)


def activation_kernels(model: Model, rows: int, width: int) -> Kernels:
    made, given = (model.element_bytes * rows * columns for columns in (width, _given_width(model, width)))
    vector = model.element_bytes * _given_width(model, width) if model.bias else 0
    if model.fuses_activation:
        return one_kernel(given + made, 2 * given + made)
    return one_kernel(2 * given + vector if model.bias else 0, 0) + _apart(model, made, given)


def weighted_kernels(model: Model, rows: int, width: int) -> Kernels:
    """Return the kernels of the experts' activation, multiplied by each row's probability: fused for SwiGLU, and for squared ReLU
    if the launch enables it."""
    if model.fuses_activation and (model.gated or (model.experts is not None and model.experts.weighted_relu)):
        return activation_kernels(model, rows, width)
    made, probabilities = model.element_bytes * rows * width, model.element_bytes * rows
    alone = model.model_copy(update={"fusions": ()}) if model.activation == "gelu" else model
    weighted = Kernels((2 * made + probabilities,), (2 * made + probabilities, 3 * made, made + probabilities))
    return activation_kernels(alone, rows, width) + weighted


def _given_width(model: Model, width: int) -> int:
    return 2 * width if model.gated else width


def _apart(model: Model, made: int, given: int) -> Kernels:
    """Return the kernels of the activation without bias. Squared ReLU is always one compiled kernel."""
    if not model.gated:
        return one_kernel(given + made, 2 * given + made)
    more = (2 * made,) * (model.glu_offset + 2 * model.activation_clamped)  # both halves are clamped
    clamped = (3 * made,) * (2 * model.activation_clamped)
    return Kernels((2 * made, *more, 3 * made), (3 * made, 3 * made, 3 * made, *clamped, 2 * given))


def residual_kernels(shape: LayerShape) -> Kernels:
    """Return the kernels after a half: bias, dropout and residual addition."""
    model, count = shape.model, shape.own_tokens * shape.model.hidden
    whole, vector = model.element_bytes * count, model.element_bytes * model.hidden if model.bias else 0
    mask = MASK_BYTES * count if model.hidden_dropout else 0
    dropped = 2 * whole + mask if model.hidden_dropout else 0
    if model.fuses("bias_dropout"):
        return one_kernel(3 * whole + mask, dropped + 3 * whole)
    added = one_kernel(2 * whole + vector if model.bias else 0, 0)
    return added + one_kernel(dropped, dropped) + one_kernel(3 * whole, 3 * whole)


def softmax_kernels(shape: LayerShape) -> Kernels:
    """Return the kernels of unfused attention's masked softmax. Transformer Engine always uses its own kernel."""
    whole = shape.model.element_bytes * shape.scores
    if shape.model.uses_te or (shape.model.fuses("masked_softmax") and _kernel_takes(shape)):
        return one_kernel(2 * whole, 3 * whole)
    masked = 2 * whole + MASK_BYTES * shape.micro * shape.model.seq * (shape.model.seq // shape.parallel.context)
    return Kernels((masked, 2 * whole), (3 * whole, 3 * whole, 2 * whole, masked))


def _kernel_takes(shape: LayerShape) -> bool:
    batches = shape.micro * shape.model.heads // shape.parallel.tensor
    return shape.model.element_bytes == 2 and shape.model.seq in KERNEL_KEYS and batches % KERNEL_BATCHES == 0


def turned_kernels(shape: LayerShape, width: int, rotary_size: int, *, interleaved: bool = False) -> Kernels:
    """Return the kernels of RoPE on `width` columns per row, with tables of `rotary_size` columns.

    `interleaved`: latent attention's, which first moves even columns before odd ones, and is never fused under a plan.
    """
    whole = shape.model.element_bytes * shape.tokens * width
    if shape.model.fuses("rope") and not interleaved:
        return one_kernel(2 * whole, 2 * whole)
    entries = shape.model.seq // shape.parallel.context * rotary_size
    table, exact = shape.model.element_bytes * entries, FP32_BYTES * entries
    cast = (exact + table,) if table != exact else ()
    tables = 2 * (2 * exact, 2 * exact, *cast)  # cosine, then sine: made, scaled, cast
    turned = (2 * whole + table, whole, 2 * whole, 2 * whole + table, 3 * whole)
    sorted_, unsorted = ((2 * whole,), (*4 * (whole,), 3 * whole)) if interleaved else ((), ())
    return Kernels((*sorted_, *tables, *turned, 2 * whole), (*turned, *unsorted, whole, 3 * whole))
