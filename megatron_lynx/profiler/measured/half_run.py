"""One half of a real layer, ready to be run again and again, with a call back at every door of a site.

start ─ [norm] ─ [linear_qkv] ─ (rotary) ─ [core_attention] ─ [linear_proj] ─ (bda) ─ end       [site]  (code)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from megatron_lynx.anatomy import Section
from megatron_lynx.nest import all_in


@dataclass(frozen=True)
class InnerNorm:
    """The norm that a linear makes inside of itself (Transformer Engine's): no door of it can be watched."""

    item: str
    """The name that plans have for this norm."""
    run: Callable[[Tensor], Any]
    """Runs the norm alone, without a graph, as the linear runs it."""
    saved: Callable[[Any, Any], tuple[Tensor | None, ...]]
    """What the linear's node saved of the norm, from its (outputs, arguments); the last two are statistics."""
    alone: Callable[[Tensor], Tensor]
    """Runs the same kernels as a module of its own, so that their backward can be timed."""


@dataclass
class HalfRun:
    """One half, ready to be run again and again from the same input."""

    section: Section
    forward: Callable[..., Any]
    arguments: dict[str, Any]
    input: Tensor
    sites: dict[str, nn.Module]
    inner_norms: Mapping[str, InnerNorm] = field(default_factory=dict)
    """By linear: the norm inside it."""

    def output(self) -> Tensor:
        result = self.forward(self.input.detach().requires_grad_(), **self.arguments)
        return first_of(result)

    @contextmanager
    def watched(self, entered: Callable[[str, Any], None], left: Callable[[str, Any], None]) -> Iterator[None]:
        """Call back at the entry of every site with its arguments, and at its exit with its outputs."""
        handles = []
        for name, module in self.sites.items():
            handles.append(
                module.register_forward_pre_hook(
                    lambda _, args, kwargs, name=name: entered(name, (args, kwargs)), with_kwargs=True
                )
            )
            handles.append(module.register_forward_hook(lambda _, args, output, name=name: left(name, output)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def sites_of(layer: Any, section: Section, *, norms: bool = True) -> dict[str, nn.Module]:
    """The submodules of one half. `norms`: whether those are among them."""
    return {item.name: attrgetter(item.path)(layer) for item in section.sites if norms or item.role != "norm"}


def code_behind(section: Section, site: str | None) -> str:
    """The item that code belongs to which runs after `site` (None: before the first)."""
    return section.norm if site is None else section.code_behind.get(site, site)


def nbytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def first_of(outputs: Any) -> Tensor:
    return all_in(Tensor, outputs)[0]
