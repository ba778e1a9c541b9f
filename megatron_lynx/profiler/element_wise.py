"""Bytes that operations between GEMMs read and write: fused in one kernel, or one kernel after the other.

    fused      arguments ──> [ one kernel ] ──> result                     every tensor is read, or written, once
    unfused    arguments ──> [ + bias ] ──> [ SiLU ] ──> [ x ] ──> result  and so is everything in between, twice

A launch says which of Megatron's fusions it has on (`model.fusions`); a kernel costs what it moves, and its start and end
(`roofline`). Replays run what forward ran.

    O: bytes of what the activation makes; I: of what it is given; R: of the residual stream; S: of the scores; T: of what
    is turned by its position
                                     fused                  unfused
    activation, GELU           fwd   I + O                  gelu 2 O                        with a bias: + 2 I
                               bwd   I + O + I              3 O
    activation, SwiGLU         fwd   I + O                  SiLU 2 O, offset 2 O, product 3 O
                               bwd   I + O + I              two products 6 O, SiLU 3 O, both halves put together 4 O
    bias, dropout, residual    fwd   3 R, mask              bias 2 R, dropout 2 R, mask, sum 3 R
    softmax of masked scores   fwd   2 S                    mask 2 S, softmax 2 S
                               bwd   3 S                    product 3 S, softmax 3 S, copy 2 S, mask 2 S
    rotary positions           fwd   2 T                    12 T and sine and cosine, which every layer makes anew
                               bwd   2 T                    14 T

Fused or not, the gradient that goes round a half is added to the one that goes through it. Sums over all rows that are gradients
of biases are the same both ways and are left out, as with linears. A norm is one kernel with `--no-persist-layer-norm`, too: what
it reads twice it finds in a cache the second time. Fused losses are in `analytic.LOSS_BYTES`.

As read in megatron-core 0.16.1 (`fused_bias_dropout.py`, `fused_bias_swiglu.py`, `mlp.py`, `rope_utils.py`, `fused_softmax.py`),
whose operators the tests count as they run; which of them are two kernels on CUDA, an H100's profile said.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_lynx.config.model import Model
from megatron_lynx.profiler.shape import FP32_BYTES, MASK_BYTES, LayerShape

KERNEL_KEYS = range(17, 4097)
"""Sequence lengths that Megatron's kernel for softmax takes (`FusedScaleMaskSoftmax.is_kernel_available`)."""
KERNEL_BATCHES = 4
"""Of how many heads and sequences a multiple it takes."""


class Kernels(NamedTuple):
    """Bytes that each kernel moves."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]

    def __add__(self, other: tuple[object, ...]) -> Kernels:
        assert isinstance(other, Kernels), "kernels are added to kernels"
        return Kernels(self.forward + other.forward, self.backward + other.backward)


def one_kernel(forward: int, backward: int) -> Kernels:
    """One for each pass, or none where nothing is moved."""
    return Kernels(tuple(moved for moved in (forward,) if moved), tuple(moved for moved in (backward,) if moved))


def norm_kernels(shape: LayerShape) -> Kernels:
    """Of a norm of the residual stream."""
    return one_kernel(2 * shape.input_bytes, 3 * shape.input_bytes)


def activation_kernels(model: Model, rows: int, width: int) -> Kernels:
    """Of an MLP's activation that makes so many columns."""
    made, given = (model.element_bytes * rows * columns for columns in (width, _given_width(model, width)))
    vector = model.element_bytes * _given_width(model, width) if model.bias else 0
    if model.fuses_activation:
        return one_kernel(given + made, 2 * given + made)
    return one_kernel(2 * given + vector if model.bias else 0, 0) + _apart(model, made, given)


def weighted_kernels(model: Model, rows: int, width: int) -> Kernels:
    """Of experts' activation, whose result is multiplied with each row's probability: by the same kernel for SwiGLU, and where
    a launch says so for squared ReLU."""
    if model.fuses_activation and (model.gated or (model.experts is not None and model.experts.weighted_relu)):
        return activation_kernels(model, rows, width)
    made, probabilities = model.element_bytes * rows * width, model.element_bytes * rows
    alone = model.model_copy(update={"fusions": ()}) if model.activation == "gelu" else model
    weighted = Kernels((2 * made + probabilities,), (2 * made + probabilities, 3 * made, made + probabilities))
    return activation_kernels(alone, rows, width) + weighted


def _given_width(model: Model, width: int) -> int:
    return 2 * width if model.gated else width


def _apart(model: Model, made: int, given: int) -> Kernels:
    """The activation alone. Squared ReLU is compiled to one kernel whatever a launch says of its bias."""
    if not model.gated:
        return one_kernel(given + made, 2 * given + made)
    more = (2 * made,) * (model.glu_offset + 2 * model.activation_clamped)  # both halves are clamped
    clamped = (3 * made,) * (2 * model.activation_clamped)
    return Kernels((2 * made, *more, 3 * made), (3 * made, 3 * made, 3 * made, *clamped, 2 * given))


def residual_kernels(shape: LayerShape) -> Kernels:
    """Of what comes behind a half: bias, dropout, and the sum with the residual stream."""
    model, count = shape.model, shape.own_tokens * shape.model.hidden
    whole, vector = model.element_bytes * count, model.element_bytes * model.hidden if model.bias else 0
    mask = MASK_BYTES * count if model.hidden_dropout else 0
    dropped = 2 * whole + mask if model.hidden_dropout else 0
    if model.fuses("bias_dropout"):
        return one_kernel(3 * whole + mask, dropped + 3 * whole)
    added = one_kernel(2 * whole + vector if model.bias else 0, 0)
    return added + one_kernel(dropped, dropped) + one_kernel(3 * whole, 3 * whole)


def softmax_kernels(shape: LayerShape) -> Kernels:
    """Of unfused attention's masked scores. Transformer Engine has its own kernel, which no flag of Megatron's switches off."""
    whole = shape.model.element_bytes * shape.scores
    if shape.model.uses_te or (shape.model.fuses("masked_softmax") and _kernel_takes(shape)):
        return one_kernel(2 * whole, 3 * whole)
    masked = 2 * whole + MASK_BYTES * shape.micro * shape.model.seq * (shape.model.seq // shape.parallel.context)
    return Kernels((masked, 2 * whole), (3 * whole, 3 * whole, 2 * whole, masked))


def _kernel_takes(shape: LayerShape) -> bool:
    batches = shape.micro * shape.model.heads // shape.parallel.tensor
    return shape.model.element_bytes == 2 and shape.model.seq in KERNEL_KEYS and batches % KERNEL_BATCHES == 0


def turned_kernels(shape: LayerShape, width: int, rotary_size: int, *, interleaved: bool = False) -> Kernels:
    """Of rotary positions of queries or keys: so many columns of each row, that are turned by tables of `rotary_size` columns.

    `interleaved`: latent attention's, which puts even columns before odd ones first, and is never fused under a plan.
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
