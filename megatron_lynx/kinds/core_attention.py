"""Core attention of any kind: saved tensors and seconds, with context parallelism and in deterministic mode.

    exchanges    of context-parallel ranks inside it                              saved by fused attention
    p2p          turn 0 on own keys | turn 1 | ... | turn c-1. A turn but the     its own queries, the last keys and values of the
                 last receives keys and values, in backward with gradients        ring
    all_gather   k, v gathered | attention; backward: gathered again |            its own queries, keys and values, which can be
                 attention | dk, dv scattered                                     recomputed
    a2a          q, k, v exchanged | attention | output exchanged                 its heads' inputs, its output before that
    a2a+p2p      a2a within groups, a ring between them

Causal attention is balanced, so turns are equal. In deterministic mode (`model.deterministic`) backward does more:

    copies      FlashAttention-2     dQ in n fp32 copies, cleared first and added up at the end; n: a block works on one head of
                                     one sequence, and every multiprocessor gets a block
    products    cuDNN on Hopper      gradients of all scores, written in 16 bits for a kernel that adds by rows
    free        cuDNN on Blackwell   its own kernel for dQ, as fast

Sources: `AttnFuncWithCPAndKVP2P`, `AttnFuncWithCPAndKVAllGather` and `AttnFuncWithCPAndQKVOA2A` of Transformer Engine 2.20;
`mha_bwd` of flash-attention (`flash_api.cpp`, `nsplits`); NVIDIA/cudnn-frontend, pull request 398 (before cuDNN 9.25 all products
are written, since then at most 256 MB); NVIDIA-NeMo/Megatron-Bridge, issue 2340.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_lynx.config.cluster import OrderedAttention
from megatron_lynx.config.parallel import Parallel
from megatron_lynx.kinds.dense.section import CORE_ATTENTION, ROTARY
from megatron_lynx.profiler.profile import SavedTensor, own_tensors
from megatron_lynx.profiler.roofline import Roofline, kernels_s, softmax_kernels
from megatron_lynx.profiler.shape import FP32_BYTES, MASK_BYTES, LayerShape
from megatron_lynx.timeline import Passes

FUSED_BACKWARD = 2.5
"""Ratio of GEMMs in fused attention's backward (five) and forward (two)."""
PRODUCT_BYTES = 2


class AttentionBytes(NamedTuple):
    """Inputs and output of the core attention on one rank. Latent attention has narrower values than keys."""

    query: int
    key: int
    value: int
    result: int


def core_tensors(shape: LayerShape) -> list[SavedTensor]:
    """Return the saved tensors besides queries, keys and values."""
    element, dropout = shape.model.element_bytes, shape.model.attention_dropout > 0
    if shape.model.attention == "flash":
        return own_tensors(CORE_ATTENTION, FP32_BYTES * shape.scores // shape.model.seq)  # log-sum-exp per row
    if not shape.eager:
        sizes = [element, MASK_BYTES, element] if dropout else [element]
        return own_tensors(CORE_ATTENTION, *(shape.scores * size for size in sizes))
    sizes = [FP32_BYTES]  # softmax's output
    if dropout:
        sizes += [element, element]  # noise, and dropout's output
    elif element != FP32_BYTES:
        sizes.append(element)  # its copy in the model's type, read by the second GEMM
    # The causal mask is a boolean each, new in every layer.
    return own_tensors(CORE_ATTENTION, shape.model.seq**2, *(shape.scores * size for size in sizes))


def kept_beside_exchange(layout: Parallel, given: AttentionBytes, handed_on: str) -> list[SavedTensor]:
    """Return the tensors saved with context parallelism. `handed_on`: the item that makes queries, keys and values."""
    traders, _ = layout.context_groups
    own_queries = handed_on if traders == 1 else CORE_ATTENTION
    own_keys = handed_on if layout.context_exchange == "all_gather" else CORE_ATTENTION
    made = ((given.query, own_queries), (given.key, own_keys), (given.value, own_keys))
    before_trade = ((given.result, CORE_ATTENTION),) if traders > 1 else ()
    return [SavedTensor(bytes=size, made_by=item, saved_by=(CORE_ATTENTION,)) for size, item in (*made, *before_trade)]


def rotary_tables(shape: LayerShape, width: int) -> list[SavedTensor]:
    """Return the sine and cosine of `width` columns that rotary positions of queries, and of keys, save."""
    table = shape.model.seq // shape.parallel.context * width * shape.model.element_bytes
    return own_tensors(ROTARY, *4 * [table])


def core_s(shape: LayerShape, flops: int, given: AttentionBytes, roof: Roofline) -> Passes:
    """Return both passes, exchange included. `flops`: of a forward over the whole square."""
    alone, layout = _alone_s(shape, flops, sum(given), roof), shape.parallel
    if layout.context == 1:
        return alone
    if layout.context_exchange == "all_gather":
        other_ranks = layout.context - 1
        both_s = roof.ring.seconds(other_ranks * given.key) + roof.ring.seconds(other_ranks * given.value)
        return alone + Passes(both_s, 2 * both_s)
    traders, turns = layout.context_groups
    if turns > 1:
        arriving = given.key + given.value
        moved_s = roof.ring.seconds(arriving), roof.ring.seconds(2 * arriving)
        turns_s = alone.forward_s / turns, alone.backward_s / turns
        alone = Passes(*(turn + (turns - 1) * max(turn, moved) for turn, moved in zip(turns_s, moved_s, strict=True)))
    traded_s = 0.0 if traders == 1 else sum(roof.traders.seconds((traders - 1) / traders * message) for message in given)
    return alone + Passes(traded_s, traded_s)


def _alone_s(shape: LayerShape, flops: int, read: int, roof: Roofline) -> Passes:
    """Return the seconds without exchange. Unfused: two batched GEMMs, a head of a sequence each, and softmax, mask and dropout
    over all scores. `read`: bytes of inputs and output."""
    if shape.model.attention == "flash":
        causal = flops / 2 * shape.seen
        kernel = shape.model.attention_kernel
        free = Passes(roof.attention_s(causal, read, kernel), roof.attention_s(FUSED_BACKWARD * causal, 2 * read, kernel))
        return _ordered_s(free, shape, roof)
    scores, heads = shape.model.element_bytes * shape.scores, shape.micro * shape.model.heads // shape.parallel.tensor
    gemms_s = 2 * roof.batched_s(heads, flops / 2, read / 2 + scores)
    dropout = 2 * scores + MASK_BYTES * shape.scores if shape.model.attention_dropout else 0
    dropout_s = roof.seconds(0, dropout) if dropout else 0.0
    softmax = kernels_s(softmax_kernels(shape), roof)
    return Passes(gemms_s + dropout_s, 2 * gemms_s + dropout_s) + softmax


def _ordered_s(free: Passes, shape: LayerShape, roof: Roofline) -> Passes:
    if shape.ordered is None:
        return free
    if (more := _copies_bytes(shape, shape.ordered)) is not None:
        return Passes(free.forward_s, free.backward_s + (roof.seconds(0, 2 * more) if more else 0.0))
    kept = shape.ordered.rate_kept if shape.ordered.way == "products" else 1.0
    return Passes(free.forward_s, free.backward_s / kept)


def ordered_bytes(shape: LayerShape) -> int:
    if shape.ordered is None:
        return 0
    if (more := _copies_bytes(shape, shape.ordered)) is not None:
        return more
    _, turns = shape.parallel.context_groups
    return PRODUCT_BYTES * shape.scores // turns if shape.ordered.way == "products" else 0


def _copies_bytes(shape: LayerShape, ordered: OrderedAttention) -> int | None:
    """Return all dQ copies except the usual one; None if these kernels make none."""
    if ordered.way != "copies" and shape.model.attention_kernel != "flash_attention_2":
        return None
    traders, _ = shape.parallel.context_groups
    blocks = shape.micro * shape.model.heads // shape.parallel.tensor // traders
    return (-(-ordered.multiprocessors // blocks) - 1) * FP32_BYTES * shape.tokens * shape.query_width
