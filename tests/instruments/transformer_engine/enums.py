"""The extension's enumerations, as far as its Python looks into them. Numbers are the extension's where any are kept in files."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import torch

__all__ = [
    "CommOverlapAlgo",
    "CommOverlapType",
    "DType",
    "FP8BwdTensors",
    "FP8FwdTensors",
    "Float8BlockScaleTensorFormat",
    "NVTEQBHistogramMode",
    "NVTERoutingMapFormat",
    "NVTEScalingMode",
    "NVTE_Bias_Type",
    "NVTE_Fused_Attn_Backend",
    "NVTE_Mask_Type",
    "NVTE_QKV_Format",
    "NVTE_QKV_Layout",
    "NVTE_Softmax_Type",
]


class DType(IntEnum):
    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10

    @property
    def of_torch(self) -> torch.dtype:
        """The same type in torch, which has none for four-bit numbers."""
        return TORCH_TYPES[self]


TORCH_TYPES = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}

FP8FwdTensors = IntEnum(
    "FP8FwdTensors",
    "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT GEMM3_INPUT GEMM3_WEIGHT GEMM3_OUTPUT",
    start=0,
)
FP8BwdTensors = IntEnum("FP8BwdTensors", "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3", start=0)
CommOverlapType = IntEnum("CommOverlapType", "RS AG", start=0)
CommOverlapAlgo = IntEnum(
    "CommOverlapAlgo",
    "BULK_OVERLAP_AG BULK_OVERLAP_RS SPLIT_PIPELINED_AG_P2P SPLIT_PIPELINED_RS SPLIT_PIPELINED_RS_P2P "
    "ATOMIC_GEMM_RS ATOMIC_GEMM_AG_P2P ATOMIC_GEMM_RS_P2P EXTERNAL_BULK_OVERLAP_AG",
    start=0,
)
Float8BlockScaleTensorFormat = IntEnum("Float8BlockScaleTensorFormat", "GEMM_READY COMPACT INVALID", start=0)
NVTEQBHistogramMode = IntEnum("NVTEQBHistogramMode", "TWO_KERNEL FUSED_ATOMIC", start=0)
NVTERoutingMapFormat = IntEnum("NVTERoutingMapFormat", "BYTEMAP BITMAP_U8", start=0)
NVTEScalingMode = IntEnum(
    "NVTEScalingMode",
    "NVTE_DELAYED_TENSOR_SCALING NVTE_MXFP8_1D_SCALING NVTE_BLOCK_SCALING_1D NVTE_BLOCK_SCALING_2D NVTE_NVFP4_1D_SCALING",
    start=0,
)
NVTE_Bias_Type = IntEnum("NVTE_Bias_Type", "NVTE_NO_BIAS NVTE_PRE_SCALE_BIAS NVTE_POST_SCALE_BIAS NVTE_ALIBI", start=0)
NVTE_Mask_Type = IntEnum(
    "NVTE_Mask_Type",
    "NVTE_NO_MASK NVTE_PADDING_MASK NVTE_CAUSAL_MASK NVTE_PADDING_CAUSAL_MASK NVTE_CAUSAL_BOTTOM_RIGHT_MASK "
    "NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
    start=0,
)
NVTE_Softmax_Type = IntEnum("NVTE_Softmax_Type", "NVTE_VANILLA_SOFTMAX NVTE_OFF_BY_ONE_SOFTMAX NVTE_LEARNABLE_SOFTMAX", start=0)
NVTE_QKV_Format = IntEnum(
    "NVTE_QKV_Format",
    "NVTE_BSHD NVTE_SBHD NVTE_THD NVTE_SBHD_2BSHD NVTE_BSHD_2SBHD NVTE_THD_2BSHD NVTE_THD_2SBHD NVTE_BHSD "
    "NVTE_QKV_Format_NOT_SET",
    start=0,
)
NVTE_QKV_Layout = IntEnum(
    "NVTE_QKV_Layout",
    "NVTE_SB3HD NVTE_SBH3D NVTE_SBHD_SB2HD NVTE_SBHD_SBH2D NVTE_SBHD_SBHD_SBHD NVTE_BS3HD NVTE_BSH3D NVTE_BSHD_BS2HD "
    "NVTE_BSHD_BSH2D NVTE_BSHD_BSHD_BSHD NVTE_T3HD NVTE_TH3D NVTE_THD_T2HD NVTE_THD_TH2D NVTE_THD_THD_THD "
    "NVTE_SBHD_BSHD_BSHD NVTE_BSHD_SBHD_SBHD NVTE_THD_BSHD_BSHD NVTE_THD_SBHD_SBHD NVTE_Paged_KV_BSHD_BSHD_BSHD "
    "NVTE_Paged_KV_BSHD_SBHD_SBHD NVTE_Paged_KV_SBHD_BSHD_BSHD NVTE_Paged_KV_SBHD_SBHD_SBHD NVTE_Paged_KV_THD_BSHD_BSHD "
    "NVTE_Paged_KV_THD_SBHD_SBHD NVTE_BHSD_BHSD_BHSD NVTE_QKV_Layout_NOT_SET",
    start=0,
)


class NVTE_Fused_Attn_Backend(IntEnum):
    """Since 2.19 a backend is answered together with the reason for it: a member unpacks into that pair."""

    NVTE_No_Backend = -1
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2

    def __iter__(self) -> Iterator[Any]:
        return iter((self, "there is no cuDNN here"))


NVTE_Fused_Attn_Backend.NVTE_F16_max512_seqlen = 0  # type: ignore[attr-defined]  # named up to 2.15, and no member for later ones
