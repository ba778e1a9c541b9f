"""Whether a job's sizes and GPUs go together with FP8: what Transformer Engine would stop at, said before anything runs."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.config.cluster import Cluster
from megatron_lynx.config.model import Model
from megatron_lynx.config.parallel import Parallel

ROWS, COLUMNS = 8, 16
"""cuBLAS takes matrices in FP8 whose sizes are multiples of these."""


def fp8_problems(model: Model, parallel: Parallel, micro: int, cluster: Cluster) -> list[str]:
    """What does not fit, in words; nothing without FP8. The testbed's cluster has no figures, and plays a Hopper."""
    if model.fp8 is None:
        return []
    return [*_unfit(model, parallel, micro), *_unable(model.fp8.recipe, cluster)]


def _unfit(model: Model, parallel: Parallel, micro: int) -> Iterator[str]:
    if model.experts is not None:
        yield "model.experts go with no model.fp8 yet: what theirs keep in FP8 is not counted"
    tensor = parallel.tensor
    rows = model.seq // parallel.context * micro // (tensor if parallel.sequence_parallel else 1)
    sizes = {
        "rows of a micro-batch on a rank": (rows, ROWS),
        "model.hidden": (model.hidden, COLUMNS),
        "model.hidden / parallel.tensor": (model.hidden // tensor, COLUMNS),
        "model.ffn / parallel.tensor": (model.ffn // tensor, COLUMNS),
        "columns of linear_qkv on a rank": (model.qkv_width // tensor, ROWS),
    }
    for what, (found, needed) in sizes.items():
        if found % needed:
            yield f"{what} ({found}) must be a multiple of {needed} with model.fp8"


def _unable(recipe: str, cluster: Cluster) -> Iterator[str]:
    if cluster.matmul is None:
        return
    if cluster.fp8 is None:
        needed = "GPUs that have it, such as those of h100-80g, h800-80g, h200-141g"
        yield f"model.fp8 is {recipe}, but the GPUs of cluster {cluster.name} have no FP8 (cluster.fp8): needed {needed}"
    elif recipe not in cluster.fp8.recipes:
        known = ", ".join(cluster.fp8.recipes)
        yield f"model.fp8.recipe is {recipe}, but the GPUs of cluster {cluster.name} take {known}"
