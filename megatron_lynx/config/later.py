"""Job fields added later: the digest leaves them out at their defaults, so that old plans still match their jobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel

from megatron_lynx.config.cluster import Cluster
from megatron_lynx.config.overlap import Overlap

LATER: dict[str, tuple[str, ...]] = {
    "model": (
        *(
            "fp8",
            "qk_norm",
            "experts",
            "attention_kernel",
            "kv_channels",
            "latent",
            "cross_entropy",
            "deterministic",
            "glu_offset",
        ),
        *("kinds", "opaque", "captured", "mtp", "activation_clamped", "window", "sinks"),
    ),
    "parallel": ("expert", "expert_tensor", "scattered_messages", "context_exchange", "context_levels", "optimizer_instances"),
    "budget": ("expandable_segments", "share", "beside", "leaves"),
    "batch": ("lengths", "packed"),
    "optimizer": ("states", "muon_steps", "matrix_states", "offload", "overlap_copies", "states_on_host", "chunk_mib"),
}
"""Added fields by part. Each has a default that changes nothing."""

IN_FP8 = ("parameters", "first_in_bf16", "last_in_bf16", "copies_kept")
IN_EXPERTS = (
    "load",
    "drops",
    "holds",
    "whole",
    "filled",
    "dispatcher",
    "shared_gate",
    "weighted_relu",
    "scores",
    "overlapped",
    "delayed",
    "multiprocessors",
    "shared_beside",
)
IN_OVERLAP = ("weight_gradients", "bucket_parameters", "buckets", "padded_buckets")
"""Added fields of `model.fp8`, of `model.experts`, and of `overlap` if another of its fields is set."""


def as_by_default(part: BaseModel, names: Iterable[str]) -> set[str]:
    return {name for name in names if getattr(part, name) == type(part).model_fields[name].default}


def left_out(parts: Mapping[str, BaseModel], overlap: Overlap, cluster: Cluster, *, fp8: bool) -> dict[str, Any]:
    """Return pydantic's `exclude`. `fp8`: the model uses FP8; else the cluster's FP8 figures are left out."""
    off: dict[str, Any] = {part: dict.fromkeys(as_by_default(parts[part], names), True) for part, names in LATER.items()}
    off["model"]["fusions"] = True  # a measured profile includes them
    if (experts := getattr(parts["model"], "experts", None)) is not None:
        off["model"]["experts"] = as_by_default(experts, IN_EXPERTS)
    if (asked := getattr(parts["model"], "fp8", None)) is not None:
        off["model"]["fp8"] = as_by_default(asked, IN_FP8)
    if (latent := getattr(parts["model"], "latent", None)) is not None and not latent.fused_rotary:
        off["model"]["latent"] = {"fused_rotary"}
    off["overlap"] = True if overlap == Overlap() else as_by_default(overlap, IN_OVERLAP)
    off["cluster"] = {"host_time": True} if fp8 else {"host_time": True, "fp8": True}
    if cluster.reserve is None:
        off["cluster"]["reserve"] = True
    if "deterministic" in off["model"]:
        off["cluster"]["ordered_attention"] = True
    if fp8 and cluster.fp8 is not None:
        off["cluster"]["fp8"] = {"efficiency"} if cluster.fp8.efficiency is None else set()
        if asked is None or asked.recipe != "nvfp4":
            off["cluster"]["fp8"].add("fp4_tflop_per_s")
    if cluster.matmul is not None and cluster.matmul.flash_attention_2_efficiency is None:
        off["cluster"]["matmul"] = {"flash_attention_2_efficiency"}
    return off
