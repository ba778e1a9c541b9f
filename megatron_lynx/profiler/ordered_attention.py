"""What fused attention's backward does more where it must add up in one order (`model.deterministic`).

    copies      FlashAttention-2     the gradient of the queries in n copies in fp32, cleared first, added up at the end
    products    cuDNN on Hopper      the gradient of all scores is written down in 16 bits, for a kernel that adds up by rows
    free        cuDNN on Blackwell   the gradient of the queries has a kernel of its own, which is as fast

n: a block works on one head of one sequence from its beginning to its end, and every multiprocessor is to have a block.

Sources: `mha_bwd` of flash-attention (`flash_api.cpp`, `nsplits`); pull request 398 of NVIDIA/cudnn-frontend: before cuDNN 9.25
all products are written down, since then no more than 256 MB of them; issue 2340 of NVIDIA-NeMo/Megatron-Bridge.
"""

from __future__ import annotations

from megatron_lynx.config.cluster import OrderedAttention
from megatron_lynx.profiler.roofline import Passes, Roofline
from megatron_lynx.profiler.shape import LayerShape

FP32_BYTES, PRODUCT_BYTES = 4, 2


def ordered_s(free: Passes, shape: LayerShape, roof: Roofline) -> Passes:
    """Seconds of fused attention, of which `free` is what it takes in any order."""
    if shape.ordered is None:
        return free
    if (more := _copies_bytes(shape, shape.ordered)) is not None:
        return Passes(free.forward_s, free.backward_s + (roof.seconds(0, 2 * more) if more else 0.0))
    kept = shape.ordered.rate_kept if shape.ordered.way == "products" else 1.0
    return Passes(free.forward_s, free.backward_s / kept)


def ordered_bytes(shape: LayerShape) -> int:
    """What the backward allocates for its order while it runs."""
    if shape.ordered is None:
        return 0
    if (more := _copies_bytes(shape, shape.ordered)) is not None:
        return more
    _, turns = shape.parallel.context_groups
    return PRODUCT_BYTES * shape.scores // turns if shape.ordered.way == "products" else 0


def _copies_bytes(shape: LayerShape, ordered: OrderedAttention) -> int | None:
    """All copies but the one that there is anyway; None where these kernels make none."""
    if ordered.way != "copies" and shape.model.attention_kernel != "flash_attention_2":
        return None
    traders, _ = shape.parallel.context_groups
    blocks = shape.micro * shape.model.heads // shape.parallel.tensor // traders
    return (-(-ordered.multiprocessors // blocks) - 1) * FP32_BYTES * shape.tokens * shape.query_width
