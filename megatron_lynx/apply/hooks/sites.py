"""The submodule calls of a layer.

Replaces              `forward` on the submodule *instances* that are sites (`self_attention.linear_qkv`, `mlp.linear_fc1`, ...).
Why                   the recorder lets go of what a replayed site saves, and a replay returns a kept site's memo without
                      running it.
Calls the original    once per call, unless a replay has its result.
Holds                 nothing.
Passes through when   the call is not made inside a half that is recorded or replayed. Halves of which nothing ever is have no
                      hooks on their sites.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from functools import partial
from typing import Any

from torch.nn import Module

from megatron_lynx.anatomy import Half
from megatron_lynx.apply.hook import Claim
from megatron_lynx.apply.site import modules_of, sited_sections_of
from megatron_lynx.apply.transformer_engine import TeRelease
from megatron_lynx.apply.transformer_engine.fp8 import Fp8Linear
from megatron_lynx.apply.transformer_engine.norm import norm_inside
from megatron_lynx.runtime.engine import Engine
from megatron_lynx.runtime.site_call import Site, SiteCall


def claims(
    engine: Engine,
    layer: Module,
    number: int,
    recorded: Container[Half],
    release: TeRelease | None = None,
    *,
    fp8: bool = False,
) -> Iterator[Claim]:
    """`recorded`: halves of which anything is replayed or offloaded. `release`: that of Transformer Engine, where the layer is
    one of its own. `fp8`: its linears may run in FP8."""
    for section in sited_sections_of(layer):
        if section.half not in recorded:
            continue
        for item, module in modules_of(section, layer, te=release is not None).items():
            first = norm_inside(module, section.norm, release) if release and item.role == "column_parallel" else None
            state = Fp8Linear(module) if fp8 and item.is_linear else None
            hooked = _as_site(engine, partial(Site, item.name, module, first=first, state=state, may_draw=item.may_draw))
            yield Claim(module, "forward", hooked, "is a site of the plan", f"layer {number}.{item.name}")


def _as_site(engine: Engine, site_of: Callable[..., Site]) -> Callable[[Any], Any]:
    def hooked(original: Any) -> Any:
        site = site_of(forward=original)

        def call_site(*args: Any, **kwargs: Any) -> Any:
            return engine.site(SiteCall(site, args, kwargs)) if engine.in_recorded_half else original(*args, **kwargs)

        return call_site

    return hooked
