"""What `configs/` offers can be used: every model and every cluster loads, and says where its figures are from."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_lynx.anatomy import ATTENTION
from megatron_lynx.config import Cluster, Model
from megatron_lynx.config.loader import bundled_configs, cluster_data
from megatron_lynx.config.parallel import Parallel
from megatron_lynx.kinds.experts.planning import mlp_matrices
from megatron_lynx.kinds.planning import planning_of
from megatron_lynx.validation import validated
from megatron_lynx.yaml_file import read_yaml

MODELS = sorted((bundled_configs() / "models").glob("*.yaml"))
CLUSTERS = sorted((bundled_configs() / "clusters").glob("*.yaml"))
BILLION_PARAMETERS = {
    "gpt-1.3b": 1.3,
    "gpt-6.7b": 6.7,
    "gpt-13b": 13,
    "gpt-20b": 20,
    "gpt-22b": 22,
    "gpt-175b": 175,
    "gpt-530b": 530,
    "gpt-1t": 1008,
    "llama-7b": 6.7,
    "llama-65b": 65.2,
    "llama-175b": 175,
    "llama2-70b": 69,
    "llama3-8b": 8,
    "llama3-70b": 70.6,
    "llama3-405b": 405,
    "mixtral-8x7b": 46.7,
    "qwen3-30b-a3b": 30.5,
    "deepseek-v2-lite": 15.7,
    "deepseek-v3": 671,
}


def loaded_model(path: Path) -> Model:
    return validated(Model, read_yaml(path), path)


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_models_have_the_size_of_their_name(path: Path) -> None:
    model = loaded_model(path)
    if path.stem.startswith("tiny"):
        return
    attention = planning_of(model.halves[ATTENTION.half]).parameters(model, Parallel()).cut
    mlp = model.hidden * (model.fc1_width + model.ffn)
    layers = model.layers * attention + (model.layers - len(model.expert_layers)) * mlp
    if model.experts is not None:
        one_expert = mlp_matrices(model, model.experts.ffn, model.routed_hidden)
        layers += len(model.expert_layers) * model.experts.count * (one_expert + model.hidden)
    embeddings = model.vocab * model.hidden * (1 if model.tied_embeddings else 2)
    found = (layers + embeddings) / 1e9
    assert found == pytest.approx(BILLION_PARAMETERS[path.stem], rel=0.035)


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_clusters_are_whole_and_named_as_their_file(path: Path) -> None:
    cluster = validated(Cluster, cluster_data(path), path)
    assert cluster.name == path.stem
    if cluster.device == "cuda":
        parts = (cluster.matmul, cluster.hbm, cluster.pcie, cluster.nic, cluster.node)
        assert None not in parts
        assert (cluster.nvlink is None) == path.stem.endswith("pcie")


@pytest.mark.parametrize("path", [path for path in CLUSTERS if path.stem != "testbed"], ids=lambda path: path.stem)
def test_every_figure_of_a_cluster_says_where_it_is_from(path: Path) -> None:
    counted = ("name:", "device:", "gpus: 8", "per_node: 8")
    lines = [line.strip() for line in path.read_text().splitlines() if not line.startswith("#")]
    figures = [line for line in lines if not line.endswith(":") and not line.startswith(counted)]
    assert [line for line in figures if "  # " not in line] == []


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_gemms_reach_half_their_best_at_a_size_that_follows_from_the_memory(path: Path) -> None:
    """n_half grows with FLOPs per byte of HBM, from the 1000 of A100 80 GB on. H800's rows are older: one share for all sizes."""
    cluster = validated(Cluster, cluster_data(path), path)
    if cluster.matmul is None or cluster.hbm is None or not cluster.matmul.half_size or path.stem.startswith("a"):
        return
    intensity = cluster.matmul.bf16_tflop_per_s / cluster.hbm.gb_per_s
    assert cluster.matmul.half_size == pytest.approx(1000 * intensity / (312 / 2039), rel=0.02)
