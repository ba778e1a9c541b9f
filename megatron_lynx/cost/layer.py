"""Bytes and FLOPs of one layer under the policies of stock Megatron and of Yuan et al.

none        saves everything
selective   all but the core attention's saved tensors (stock: `--recompute-granularity selective`)
balanced    all but outputs of norms and of the activation: no GEMM or attention is recomputed (Yuan et al., ATC '24)
full        the layer's input only (stock: `--recompute-granularity full`)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import lru_cache

from megatron_lynx.anatomy import ATTENTION, HALVES, MLP, LayerKind, Section, filling
from megatron_lynx.config.job import Policy
from megatron_lynx.cost.recompute import recomputation_of
from megatron_lynx.kinds.dense.section import ACTIVATION, CORE_ATTENTION
from megatron_lynx.kinds.planning import planning_of
from megatron_lynx.profiler.shape import LayerShape

BALANCED = (ATTENTION.norm, MLP.norm, ACTIVATION)
CORE_ALONE = (CORE_ATTENTION, CORE_ATTENTION)


def recomputed_items(policy: Policy) -> tuple[str, ...]:
    """Return the items recomputed in backward. Raises `KeyError` for `planned`."""
    usual = (name for half in HALVES for section in filling(half) if not section.in_some_layers for name in section.names)
    return {"none": (), "selective": (CORE_ATTENTION,), "balanced": BALANCED, "full": tuple(dict.fromkeys(usual))}[policy]


@lru_cache(maxsize=1024)
def kept_bytes(shape: LayerShape, policy: Policy, kind: LayerKind | None = None) -> int:
    """Return the bytes one layer saves of one micro-batch, its input included. `kind`: default a layer without experts. These
    recompute nothing under `balanced` and `selective`."""
    if policy == "full":
        return shape.input_bytes
    sections = kind or shape.model.kind_sections(experts=False)
    return sum(half_kept_bytes(shape, section, policy) for section in sections)


def half_kept_bytes(shape: LayerShape, section: Section, policy: Policy = "none") -> int:
    """Return the bytes one half saves; 0 for an absent half."""
    if section.opaque and shape.model.opaque_in(section).nothing:
        return 0
    face = planning_of(section)
    if section.in_some_layers or policy not in ("selective", "balanced"):
        return shape.input_bytes + sum(tensor.bytes for tensor in face.tensors(shape) if tensor.saved_by)
    if policy == "balanced":
        items = [item for item in BALANCED if item in section.names]
        return shape.input_bytes + recomputation_of(section, face.tensors(shape), items).stays_bytes
    # Stock's checkpoint of the core attention saves its arguments, and exchanges other ranks' keys and values again. It keeps its
    # output, which linear_proj reads.
    layout = shape.parallel.model_copy(update={"context_exchange": "all_gather", "context_levels": None})
    tensors = face.tensors(replace(shape, parallel=layout))
    stays = [tensor for tensor in tensors if (tensor.made_by, *tensor.saved_by) != CORE_ALONE]
    given_bytes = face.core_arguments_bytes(shape) if len(stays) < len(tensors) else 0
    return shape.input_bytes + given_bytes + sum(tensor.bytes for tensor in stays if tensor.saved_by)


def beyond_fp8_bytes(shape: LayerShape, layers: range) -> int:
    """Return how much more these layers save in bf16 than in FP8, with nothing recomputed."""
    plain = replace(shape, model=shape.model.model_copy(update={"fp8": None})) if layers else shape
    kinds = map(shape.model.sections, layers)
    return sum(max(0, kept_bytes(plain, "none", kind) - kept_bytes(shape, "none", kind)) for kind in kinds)


def layers_bytes(shape: LayerShape, policy: Policy, kinds: Mapping[LayerKind, int]) -> int:
    return sum(layers * kept_bytes(shape, policy, kind) for kind, layers in kinds.items())


def recomputed_flops(shape: LayerShape, recompute: Collection[str], kind: LayerKind | None = None) -> int:
    """Return the FLOPs one layer recomputes for one micro-batch on one rank. `kind`: default a layer without experts."""
    total = 0
    for section in kind or shape.model.kind_sections(experts=False):
        if section.opaque:
            continue
        face = planning_of(section)
        flops, runs = face.flops(shape), recomputation_of(section, face.tensors(shape), recompute).runs
        total += sum(flops[item] for item in runs if item in recompute)
    return total
