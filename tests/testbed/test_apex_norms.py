"""Apex's LayerNorm on CPU ranks: its own Python, where APEX_DIR names a checkout; its compiled part is stood in for."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from megatron_lynx.testbed.ranks import RankPool
from tests.tiny_jobs import tiny_job

from ..instruments import apex_norms
from . import on_ranks


@pytest.mark.parametrize("memory_efficient", [False, True])
def test_backward_is_torchs_from_input_or_output(memory_efficient):
    torch.manual_seed(3)
    leaves = [torch.randn(5, 2, 8, requires_grad=True), torch.rand(8) + 1, torch.randn(8)]
    x, weight, bias = (leaf.requires_grad_() for leaf in leaves)
    expected, dz = torch.nn.functional.layer_norm(x, (8,), weight, bias, 1e-5), torch.randn(5, 2, 8)
    z, mean, invvar = apex_norms.forward_affine(x, (8,), weight, bias, 1e-5)
    torch.testing.assert_close(z, expected.detach())
    saved = (None, invvar, z) if memory_efficient else (mean, invvar, x)
    found = apex_norms.backward_affine(dz, *saved, (8,), weight, bias, 1e-5, memory_efficient)
    for ours, theirs in zip(found, torch.autograd.grad(expected, leaves, dz), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("memory_efficient", [False, True])
def test_megatrons_fused_norm_trains_as_torchs_does(memory_efficient):
    if not os.path.isdir(os.path.join(os.environ.get("APEX_DIR", ""), "apex")):
        pytest.skip("no checkout of Apex (APEX_DIR)")
    path = os.pathsep.join([os.path.abspath(os.environ["APEX_DIR"]), *(entry or os.getcwd() for entry in sys.path)])
    job = tiny_job(tensor=2, sequence_parallel=True, attention_dropout=0.0, hidden_dropout=0.0)
    with RankPool(2, env={"PYTHONPATH": path}) as pool:
        setting = {"memory_efficient_layer_norm": memory_efficient}
        for is_apex, apart in pool.run(on_ranks.apex_against_torch, job, setting):
            assert is_apex
            assert apart < 1e-4
