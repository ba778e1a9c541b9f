"""Measures one real layer on this machine: seconds of every item, forward and backward, and every saved memory block.

    TransformerLayer ──HalfRun──> repeated runs ──seconds──> per item, forward and backward
                                                └─blocks───> saved blocks, the items that made and saved them

Transformer Engine's linears may contain norms. These norms are also run alone, and their part of the tensors that the linear's
node saves is separated (`InnerNorm`).

The given layer is one tensor-parallel shard without a group: it has a part of the heads and of the FFN (`shard_arguments`), and
its figures contain no communication.
"""

from megatron_lynx.profiler.measured.blocks import held_bytes
from megatron_lynx.profiler.measured.half_run import InnerNorm
from megatron_lynx.profiler.measured.layer import TeLayer, measure_layer, shard_arguments
from megatron_lynx.profiler.measured.seconds import measure_block

__all__ = ["TeLayer", "InnerNorm", "held_bytes", "measure_block", "measure_layer", "shard_arguments"]
