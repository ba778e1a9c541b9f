"""Measures one real layer on this machine: the seconds of every item forward and backward, and every memory block it saves.

    TransformerLayer ──HalfRun──> run again and again ──seconds──> of each item, forward and backward
                                                      └─blocks───> what is saved, by whom, made by whom

A layer of Transformer Engine makes its norms inside of linears. They are run alone as well, and what the linear's node saved of
them is told apart (`InnerNorm`).

The layer is handed in, of one rank and without a group: a tensor-parallel shard is a layer with a share of the heads and of
the FFN (`shard_arguments`), so that no communication is in the figures.
"""

from megatron_lynx.profiler.measured.blocks import held_bytes
from megatron_lynx.profiler.measured.half_run import InnerNorm
from megatron_lynx.profiler.measured.layer import TeLayer, measure_layer, shard_arguments
from megatron_lynx.profiler.measured.seconds import measure_block

__all__ = ["TeLayer", "InnerNorm", "held_bytes", "measure_block", "measure_layer", "shard_arguments"]
