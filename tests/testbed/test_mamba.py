"""The stand-in for Mamba's kernels computes what they are defined by."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from tests.instruments.mamba import RMSNorm, split_conv1d_scan

B, L, H, P, G, N, WIDTH = 2, 7, 4, 3, 2, 5, 4


def test_the_scan_is_the_recurrence():
    """A state for each head, which decays and takes up each row in turn, behind a causal convolution."""
    torch.manual_seed(1)
    inner, convolved = H * P, H * P + 2 * G * N
    given = torch.randn(B, L, inner + convolved + H, dtype=torch.float64).float()
    weight, bias, dt_bias, A, D = (torch.randn(*size) for size in ((convolved, WIDTH), (convolved,), (H,), (H,), (H,)))
    A = -A.exp()
    found = split_conv1d_scan(given, weight, bias, dt_bias, A, D, 128, "silu", P, G, norm_before_gate=False)
    gate, mixed, dt = given.split([inner, convolved, H], dim=-1)
    state = torch.zeros(B, H, P, N)
    for row in range(L):
        taps = F.pad(mixed, (0, 0, WIDTH - 1, 0))[:, row : row + WIDTH]  # this row is the last of them
        x, of_B, of_C = F.silu((taps * weight.T).sum(1) + bias).split([inner, G * N, G * N], dim=-1)
        x, seconds = x.view(B, H, P), F.softplus(dt[:, row] + dt_bias)
        of_B, of_C = (each.view(B, G, 1, N).expand(B, G, H // G, N).reshape(B, H, N) for each in (of_B, of_C))
        state = state * (seconds * A).exp()[..., None, None] + torch.einsum("bh,bhp,bhn->bhpn", seconds, x, of_B)
        expected = (torch.einsum("bhpn,bhn->bhp", state, of_C) + D[:, None] * x).flatten(1) * F.silu(gate[:, row])
        torch.testing.assert_close(found[:, row], expected)


def test_the_norm_is_over_groups_behind_the_gate():
    norm = RMSNorm(6, 1e-5, 3, norm_before_gate=False, device="cpu", dtype=torch.float32)
    given, gate = torch.randn(2, 6), torch.randn(2, 6)
    gated = (given * F.silu(gate)).view(2, 2, 3)
    expected = (gated / (gated.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()).view(2, 6)
    torch.testing.assert_close(norm(given, gate), expected)
