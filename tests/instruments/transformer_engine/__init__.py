"""Runs Transformer Engine's own Python on a CPU: a stand-in in plain torch replaces only its compiled extension.

    megatron.core ──> transformer_engine.pytorch (real files, any release from 2.4 on) ──> transformer_engine_torch
                                                                                           stood in for, in plain torch

The Python of a release is in pip's `transformer_engine` wheel (about 1 MB, no dependencies); the Makefile unpacks some into
`build/transformer-engine-*`. Put one on the import path of the ranks, and it is there:

    path = os.pathsep.join([str(folder), *sys.path])
    RankPool(2, env={"PYTHONPATH": path})        # in a test; elsewhere `tests.instruments.offer()` before

    PYTHONPATH=CHECKOUT:folder TESTBED_STAND_INS=tests.instruments torchrun -m tests.instruments pretrain_gpt.py

A process of its own that is no rank calls `stand_in_for_transformer_engine()`, after `stand_in_for_cuda()` and before Megatron is
imported: Megatron decides at its import whether Transformer Engine is there.

FP8 with one scale per tensor (delayed and current scaling) or per block, FP4 and userbuffers are there; attention is unfused.
Numbers are computed in fp32 and rounded once, as cuBLAS's epilogues do; they are deterministic, and close to a GPU's, not equal
to them. A function of the extension that is not answered raises `NotImplementedError` with its name when it is called.
"""

from tests.instruments.transformer_engine.imports import stand_in_for_transformer_engine

__all__ = ["stand_in_for_transformer_engine"]
