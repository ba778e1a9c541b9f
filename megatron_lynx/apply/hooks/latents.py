"""What tensor-parallel ranks gather between the sites of latent attention.

Replaces              `gather_from_tensor_model_parallel_region` and `gather_from_sequence_parallel_region` in
                      `megatron.core.transformer.multi_latent_attention` (bound there at import).
Why                   the code between two sites runs again in a replay, which must not communicate (rule R2). A gather is treated
                      as a site that is always kept: what it returned, tokens that were compressed, is remembered, and a replay
                      that passes it gets that.
Calls the original    once per call, and never in a replay.
Holds                 nothing.
Passes through when   the call is not made inside a half that is recorded or replayed.
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
