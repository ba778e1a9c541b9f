"""Jobs on catalogued models and clusters."""

from __future__ import annotations

from typing import Any

from megatron_lynx.config import Job
from megatron_lynx.config.loader import bundled_configs, cluster_data
from megatron_lynx.yaml_file import read_yaml


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
    """Yuan et al.'s job of figure 7, but for what is given. `fp8`: a recipe."""
    shape = read_yaml(bundled_configs() / "models" / f"{model}.yaml")
    layout = {"tensor": 2, "pipeline": 8, "layers_per_chunk": 2, "sequence_parallel": True, "distributed_optimizer": True}
    recipe = {"fp8": {"recipe": fp8}, "implementation": "transformer_engine"} if fp8 else {}
    recipe |= {"implementation": implementation} if implementation else {}
    data = {
        "model": shape | recipe | ({"seq": seq} if seq else {}),
        "cluster": cluster_data(bundled_configs() / "clusters" / f"{cluster}.yaml"),
        "gpus": gpus,
        "parallel": layout if parallel is None else parallel,
        "batch": {"micro": micro, "global": batch},
        "policy": policy,
    }
    return Job.model_validate(data | fields)
