"""Measuring one real layer on this machine: every item forward and backward, and every memory block it saves.

    TransformerLayer ──HalfRun──> run again and again ──seconds──> of each item, forward and backward
                                                      └─blocks───> what is saved, by whom, made by whom

The layer is handed in, of one rank and without a group: a tensor-parallel shard is a layer with a share of the heads and of
the FFN (`shard_arguments`), so that no communication is in the figures.
"""

from megatron_lynx.profiler.measured.blocks import held_bytes
from megatron_lynx.profiler.measured.layer import measure_layer, shard_arguments
from megatron_lynx.profiler.measured.seconds import measure_block

__all__ = ["held_bytes", "measure_block", "measure_layer", "shard_arguments"]
