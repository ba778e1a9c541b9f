"""Published runs as jobs on catalogued models and clusters."""

from __future__ import annotations

from typing import Any

from megatron_lynx.config import Job, Model
from megatron_lynx.config.loader import bundled_configs, cluster_data
from megatron_lynx.validation import validated
from megatron_lynx.yaml_file import read_yaml


def catalogued_job(name: str, cluster: str, *, seq: int | None = None, model: dict[str, Any] | None = None, **fields: Any) -> Job:
    """A job on `models/NAME`, with another sequence length if one is given, and `clusters/CLUSTER`. `model`: what of the model is
    otherwise; `fields`: the job's other keys."""
    shape = read_yaml(bundled_configs() / f"models/{name}.yaml") | (model or {})
    described = cluster_data(bundled_configs() / f"clusters/{cluster}.yaml")
    data = {"model": shape | ({"seq": seq} if seq else {}), "cluster": described, **fields}
    return validated(Job, data, f"{name} on {cluster}")


def described_job(model: Model, cluster: str, **fields: Any) -> Job:
    """A job on a model that is written out, and `clusters/CLUSTER`."""
    described = cluster_data(bundled_configs() / f"clusters/{cluster}.yaml")
    return validated(Job, {"model": model.model_dump(mode="json"), "cluster": described, **fields}, f"a model on {cluster}")


def published_figures(name: str = "published") -> dict[str, Any]:
    """A file of figures, as it stands."""
    return read_yaml(bundled_configs() / f"{name}.yaml")
