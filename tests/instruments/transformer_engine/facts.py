"""Answers what Transformer Engine asks about its libraries. There is no cuDNN, so there is no fused attention."""

from __future__ import annotations

from typing import Any

from tests.instruments.transformer_engine.enums import NVTE_Fused_Attn_Backend

__all__ = [
    "device_supports_multicast",
    "get_cublasLt_version",
    "get_cudnn_version",
    "get_fused_attn_backend",
    "get_num_cublas_streams",
    "get_stream_priority_range",
    "ubuf_built_with_mpi",
]


def get_cudnn_version() -> int:
    """9.14, encoded: newer than anything asks for."""
    return 91400


def get_cublasLt_version() -> int:
    return 130000


def get_fused_attn_backend(*args: Any, **kwargs: Any) -> Any:
    """No fused backend, so that `DotProductAttention` takes its unfused one."""
    return NVTE_Fused_Attn_Backend.NVTE_No_Backend


def get_num_cublas_streams() -> int:
    return 4


def get_stream_priority_range(device: int = 0) -> tuple[int, int]:
    return 0, 0


def device_supports_multicast(device: int = 0) -> bool:
    return False


def ubuf_built_with_mpi() -> bool:
    return False
