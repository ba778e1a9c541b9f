"""Gathers between the sites of latent attention.

Replaces              `gather_from_tensor_model_parallel_region` and `gather_from_sequence_parallel_region` in
                      `megatron.core.transformer.multi_latent_attention` (bound there at import).
Why                   a recomputation runs the code between two sites, and must not communicate (rule R2). A gather is a site
                      that is always kept: its output, compressed tokens, is stored, and a recomputation uses that.
Calls the original    once per call, and never in a recomputation.
Holds                 nothing.
Passes through when   the call is outside of a half that is recorded or recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from typing import Any

import torch

from megatron_lynx.apply.hook import Claim
from megatron_lynx.runtime.engine import Engine
from megatron_lynx.runtime.site import Site

GATHERS = ("gather_from_tensor_model_parallel_region", "gather_from_sequence_parallel_region")


def claims(engine: Engine) -> Iterator[Claim]:
    from megatron.core.transformer import multi_latent_attention

    for name in GATHERS:
        yield Claim(multi_latent_attention, name, _remembered(engine), "gathers what was compressed")


def _remembered(engine: Engine) -> Any:
    def hooked(original: Any) -> Any:
        site = Site("gathered latents", torch.nn.Module(), original, may_draw=False)
        return wraps(original)(engine.reported(site))

    return hooked
