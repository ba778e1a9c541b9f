"""Whether experts can be spread over ranks as a job says.

ranks of one stage     tensor x context x data                   attention, router, shared experts
the same ranks         expert_tensor x expert x expert data      experts: each group of `expert` ranks holds all of them
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.config.experts import Experts
from megatron_lynx.config.model import Model
from megatron_lynx.config.parallel import Parallel


def problems(model: Model, parallel: Parallel, gpus: int) -> Iterator[str]:
    """What Megatron would stop at, in words with both numbers (`parallel_state.initialize_model_parallel`,
    `TransformerConfig.__post_init__`, `MoELayer.forward`)."""
    experts = model.experts
    if experts is None:
        asked = [name for name in ("expert", "expert_tensor") if getattr(parallel, name) not in (1, None)]
        yield from (f"parallel.{name} ({getattr(parallel, name)}) needs model.experts, found none" for name in asked)
        return
    yield from _undivided(model, experts, parallel)
    width = parallel.expert_tensor_size * parallel.expert * parallel.pipeline
    if gpus % width:
        sizes = "parallel.expert_tensor x parallel.expert x parallel.pipeline"
        yield f"gpus ({gpus}) must be a multiple of {sizes} ({width})"
    if parallel.tensor > 1 and not parallel.sequence_parallel:
        yield f"parallel.tensor ({parallel.tensor}) with experts needs parallel.sequence_parallel: true, found false"
    if model.bias and parallel.expert_tensor_size > 1:
        yield f"parallel.expert_tensor ({parallel.expert_tensor_size}) must be 1 for experts with biases (model.bias: true)"
    if model.bias and experts.shared_ffn:
        yield f"model.experts.shared_ffn ({experts.shared_ffn}) needs model.bias: false, found true"


def _undivided(model: Model, experts: Experts, parallel: Parallel) -> Iterator[str]:
    tensor = parallel.expert_tensor_size
    if experts.count % parallel.expert:
        yield f"model.experts.count ({experts.count}) must be a multiple of parallel.expert ({parallel.expert})"
    if experts.ffn % tensor:
        yield f"model.experts.ffn ({experts.ffn}) must be a multiple of parallel.expert_tensor ({tensor})"
    if experts.shared_ffn % parallel.tensor:
        yield f"model.experts.shared_ffn ({experts.shared_ffn}) must be a multiple of parallel.tensor ({parallel.tensor})"
    if (beyond := experts.beyond(model.layers)) is not None:
        yield f"model.experts.layers names layer {beyond}, but model.layers is {model.layers}"
