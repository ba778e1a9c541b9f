"""What Transformer Engine allocates for userbuffers (--tp-comm-overlap), beside PyTorch's allocator and before the first step.

                                                                   tensors     with FP8
    gathered    qkv, fc1 forward and dgrad, proj, fc2 dgrad and wgrad    8     in bytes
    scattered   proj, fc2 forward, qkv, fc1 wgrad                        4     in 16 bits

Each holds all rows of a micro-batch, and serves all layers. Source: `initialize_ub` of Transformer Engine 2.9 to 2.20 as Megatron
calls it (the methods that are the default; a ring that scatters holds almost twice as much).
"""

from __future__ import annotations

from megatron_lynx.config.job import Job
from megatron_lynx.profiler.quantized import BF16_BYTES, FP8_BYTES
from megatron_lynx.profiler.shape import LayerShape

GATHERED, SCATTERED = 8, 4


def userbuffers_bytes(job: Job, shape: LayerShape) -> int:
    """Bytes of all userbuffers of a device. None without them."""
    if not job.userbuffers:
        return 0
    gathered = GATHERED * shape.gathered_bytes
    if job.model.fp8 is not None:
        gathered = gathered * FP8_BYTES // BF16_BYTES
    return gathered + SCATTERED * shape.gathered_bytes
