"""Instruments that show on a CPU what only a GPU would: late streams, hardware queues, Transformer Engine's and Apex's kernels.

    streams               copies that run late in raw memory, and a record of what comes before what: who would race
    queues                replays together what all ranks gave their streams, with one hardware queue or several: who would hang
    compiler              compiled fusions on a CPU
    transformer_engine    its own Python on a CPU, a stand-in in plain torch for its compiled extension
    apex_norms            the same for the compiled parts of Apex's LayerNorms
    latent_rotary         the same for Megatron's kernels on triton that turn rotary parts of latent attention
    graphs                captured CUDA graphs: operators of a capture, run again on the same memory
    deep_ep               DeepEP's and HybridEP's buffers, over all-to-alls
    mamba                 kernels of Mamba layers, in torch
    delta_rule            those of gated delta nets
    context_attention     a core attention that exchanges keys and values between ranks
    groups                the testbed's groups, for ranks that train one model after another
    tiny_models           the testbed's models, with the same weights in every layout
    tensor_types          `Tensor.type()` of a GPU, for optimizers
    posted                works that nobody has waited for, and synchronisations that would hang
    training              training with Megatron's DistributedDataParallel and an optimizer, and evaluation
    script_device         what Megatron's scripts ask of a GPU machine: `python -m tests.instruments SCRIPT`

They are no part of the wheel. The testbed's ranks take them, but `mamba`'s, where TESTBED_STAND_INS names this package:
`tests/conftest.py` does, and scripts and benchmarks that run such layers without a GPU do with `offer()`.
"""

from __future__ import annotations

import os
from contextlib import ExitStack

from megatron_lynx.testbed.cpu_device import STAND_INS


def offer() -> None:
    """Let this process and those that it starts have the stand-ins, unless the environment names others."""
    os.environ.setdefault(STAND_INS, __name__)


def stand_in() -> ExitStack:
    """Answer for CUDA, and for the compiled parts that this machine lacks, until the returned stack is closed."""
    from megatron_lynx.testbed.cpu_device import stand_in_for_cuda, stand_in_for_missing_modules
    from tests.instruments.apex_norms import stand_in_for_apex_norms
    from tests.instruments.compiler import COMPILER, stand_in_for_compiler
    from tests.instruments.deep_ep import stand_in_for_deep_ep
    from tests.instruments.latent_rotary import stand_in_for_latent_rotary
    from tests.instruments.posted import stand_in_for_posted
    from tests.instruments.tensor_types import stand_in_for_tensor_types
    from tests.instruments.transformer_engine import stand_in_for_transformer_engine

    undo = ExitStack()
    if backend := os.environ.pop(COMPILER, ""):
        undo.enter_context(stand_in_for_compiler(backend))  # type: ignore[arg-type]
    undo.enter_context(stand_in_for_cuda())
    undo.enter_context(stand_in_for_missing_modules())
    undo.enter_context(stand_in_for_tensor_types())
    undo.enter_context(stand_in_for_transformer_engine())
    undo.enter_context(stand_in_for_apex_norms())
    undo.enter_context(stand_in_for_latent_rotary())
    undo.enter_context(stand_in_for_deep_ep())
    stand_in_for_posted(undo)
    return undo
