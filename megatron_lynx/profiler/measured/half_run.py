"""One half of a real layer that can be run repeatedly, with callbacks at the entry and exit of every site.

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
    """A norm inside a Transformer Engine linear, which has no hooks."""

    item: str
    run: Callable[[Tensor], Any]
    """Runs the norm alone, without a graph, as the linear does."""
    saved: Callable[[Any, Any], tuple[Tensor | None, ...]]
    """Returns the norm's tensors among those that the linear's node saved, from its (outputs, arguments); the last two are
    statistics."""
    alone: Callable[[Tensor], Tensor]
    """Runs the same kernels as a separate module, to time their backward."""


@dataclass
class HalfRun:
    section: Section
    forward: Callable[..., Any]
    arguments: dict[str, Any]
    input: Tensor
    sites: dict[str, nn.Module]
    inner_norms: Mapping[str, InnerNorm] = field(default_factory=dict)

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
    return {item.name: attrgetter(item.path)(layer) for item in section.sites if norms or item.role != "norm"}


def code_behind(section: Section, site: str | None) -> str:
    """Return the item of the code after `site` (None: before the first site)."""
    return section.norm if site is None else section.code_behind.get(site, site)


def nbytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def first_of(outputs: Any) -> Tensor:
    return all_in(Tensor, outputs)[0]
