"""Jobs on catalogued models and clusters."""

from __future__ import annotations

from typing import Any

from megatron_lynx.config import Job
from megatron_lynx.config.loader import bundled_configs, cluster_data
from megatron_lynx.yaml_file import read_yaml

TIGHT_GIB = {"a100-40g": 32.3, "h200-141g": 113.0, "b200-180g": 135.0, "gb200-nvl72": 139.7, "gb300-nvl72": 210.0}
"""Four fifths of a device, by cluster; where none is named, of 80 GB. So tight that plans have something to do."""


def catalogued_job(
    model: str = "llama-65b",
    cluster: str = "h800-80g",
    *,
    gpus: int = 256,
    micro: int = 1,
    batch: int = 256,
    policy: str = "balanced",
    seq: int | None = None,
    fp8: str | None = None,
    implementation: str | None = None,
    parallel: dict[str, Any] | None = None,
    **fields: Any,
) -> Job:
    """Yuan et al.'s job of figure 7, but for what is given. `fp8`: a recipe. Without a `budget`, four fifths of a device."""
    shape = read_yaml(bundled_configs() / "models" / f"{model}.yaml")
    layout = {"tensor": 2, "pipeline": 8, "layers_per_chunk": 2, "sequence_parallel": True, "distributed_optimizer": True}
    recipe = {"fp8": {"recipe": fp8}, "implementation": "transformer_engine"} if fp8 else {}
    recipe |= {"implementation": implementation} if implementation else {}
    budget = {} if cluster == "testbed" else {"memory_gib": TIGHT_GIB.get(cluster, 64.6)}
    data = {
        "budget": budget,
        "model": shape | recipe | ({"seq": seq} if seq else {}),
        "cluster": cluster_data(bundled_configs() / "clusters" / f"{cluster}.yaml"),
        "gpus": gpus,
        "parallel": layout if parallel is None else parallel,
        "batch": {"micro": micro, "global": batch},
        "policy": policy,
    }
    return Job.model_validate(data | fields)
