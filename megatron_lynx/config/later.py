"""What jobs could not always say, and what it is where it changes nothing.

A job's digest leaves it out, so that old plans know their jobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from megatron_lynx.config.cluster import Cluster
from megatron_lynx.config.experts import BALANCED
from megatron_lynx.config.overlap import Overlap

LATER: dict[str, dict[str, Any]] = {
    "model": {
        "fp8": None,
        "qk_norm": False,
        "experts": None,
        "attention_kernel": "usual",
        "kv_channels": None,
        "latent": None,
        "cross_entropy": "unfused",
        "deterministic": False,
        "glu_offset": True,
        "kinds": (),
        "opaque": (),
        "captured": (),
        "mtp": 0,
        "activation_clamped": False,
        "window": None,
        "sinks": False,
    },
    "parallel": {
        "expert": 1,
        "expert_tensor": None,
        "scattered_messages": False,
        "context_exchange": "p2p",
        "context_levels": None,
    },
    "budget": {"expandable_segments": True, "share": None, "beside": (), "leaves": ()},
    "batch": {"lengths": None},
    "optimizer": {"states": 2, "offload": 0.0, "overlap_copies": False},
}
"""Fields by their part."""


IN_FP8: dict[str, Any] = {"parameters": False, "first_in_bf16": 0, "last_in_bf16": 0}
"""The same of `model.fp8`."""

IN_EXPERTS: dict[str, Any] = {
    "load": BALANCED,
    "holds": None,
    "whole": False,
    "filled": False,
    "dispatcher": "alltoall",
    "shared_gate": False,
    "overlapped": False,
}
"""The same of `model.experts`."""

IN_OVERLAP = ("weight_gradients", "bucket_parameters", "buckets", "padded_buckets")
"""Of `overlap`, where anything else of it is stated."""


def left_out(parts: Mapping[str, BaseModel], overlap: Overlap, cluster: Cluster, *, fp8: bool) -> dict[str, Any]:
    """What pydantic is to exclude. `fp8`: whether the model asks for it; else the cluster's figures for it do not matter."""
    off: dict[str, Any] = {
        part: dict.fromkeys((name for name, value in names.items() if getattr(parts[part], name) == value), True)
        for part, names in LATER.items()
    }
    off["model"]["fusions"] = True  # what a measured profile knows better
    if (experts := getattr(parts["model"], "experts", None)) is not None:
        off["model"]["experts"] = {name for name, value in IN_EXPERTS.items() if getattr(experts, name) == value}
    if (asked := getattr(parts["model"], "fp8", None)) is not None:
        off["model"]["fp8"] = {name for name, value in IN_FP8.items() if getattr(asked, name) == value}
    if (latent := getattr(parts["model"], "latent", None)) is not None and not latent.fused_rotary:
        off["model"]["latent"] = {"fused_rotary"}
    if overlap == Overlap():
        off["overlap"] = True
    else:
        off["overlap"] = {name for name in IN_OVERLAP if getattr(overlap, name) == getattr(Overlap(), name)}
    off["cluster"] = {"host_time": True} if fp8 else {"host_time": True, "fp8": True}
    if cluster.reserve is None:
        off["cluster"]["reserve"] = True
    if "deterministic" in off["model"]:
        off["cluster"]["ordered_attention"] = True
    if fp8 and cluster.fp8 is not None and cluster.fp8.efficiency is None:
        off["cluster"]["fp8"] = {"efficiency"}
    if cluster.matmul is not None and cluster.matmul.flash_attention_2_efficiency is None:
        off["cluster"]["matmul"] = {"flash_attention_2_efficiency"}
    return off
