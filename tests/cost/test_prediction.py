"""What multi-token prediction adds: parameters, kept bytes and FLOPs of a real model's last stage; seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron_lynx.config.job import Job
from megatron_lynx.cost.communication import head_of
from megatron_lynx.cost.ends import last_end_of, loss_kept_bytes, predicting_bytes
from megatron_lynx.cost.parameters import flops_per_token, parameter_tensors, stage_parameters
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.testbed.ranks import RankPool
from tests.profiler.made_up import made_up_profile
from tests.stock.parts import stage_parts
from tests.tiny_jobs import tiny_job

Pools = Callable[[int], RankPool]
NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
WITH_EXPERTS = {"experts": {"count": 4, "per_token": 2, "ffn": 32, "layers": ("2",)}}
JOBS = {
    "tied, learned positions": tiny_job("gpt", layers=2, mtp=1),
    "of its own, twice": tiny_job("llama", layers=2, mtp=2),
    "with experts": tiny_job("llama", layers=2, mtp=1, **WITH_EXPERTS),
    "PP2, tied": tiny_job("gpt", layers=2, mtp=1, pipeline=2),
    "PP2": tiny_job("llama", layers=3, pipeline=2, partition=(2, 1), mtp=1),
}


def parameters_of(rank: int, job: Job) -> tuple[int, int]:
    """How many parameters a real stage has, and as how many tensors."""
    from tests.instruments.groups import initialise
    from tests.instruments.tiny_models import build_model

    initialise(job)
    sizes = [parameter.numel() for chunk in build_model(job) for parameter in chunk.parameters()]
    return sum(sizes), len(sizes)


def assert_parameters(pool_of: Pools, job: Job) -> None:
    """Every stage has as many, in as many tensors, as are counted."""
    found = pool_of(job.gpus).run(parameters_of, job)
    stages = range(job.parallel.pipeline)
    assert found == [(stage_parameters(job, stage).total, parameter_tensors(job, stage).total) for stage in stages]


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS.keys())
def test_a_real_stage_has_as_many_parameters(pool_of: Pools, job: Job) -> None:
    assert_parameters(pool_of, job)


def kept_by(rank: int, job: Job) -> int:
    """Bytes of all blocks that a forward with its loss keeps for backward, parameters and what it was called with left out."""
    import torch

    from megatron_lynx.testbed.groups import seed_random_numbers
    from megatron_lynx.testbed.training import synthetic_batches
    from tests.instruments.groups import initialise
    from tests.instruments.tiny_models import build_model

    initialise(job)
    [chunk] = build_model(job)
    seed_random_numbers(1)
    [batch] = synthetic_batches(job)[:1]
    lasting = {one.untyped_storage().data_ptr() for one in (*chunk.parameters(), *chunk.buffers(), batch.tokens, batch.labels)}
    blocks: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in lasting:
            blocks[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = chunk(batch.tokens, batch.position_ids, None, labels=batch.labels).sum()
    size = sum(storage.nbytes() for storage in blocks.values())
    loss.backward()
    return size


@pytest.mark.parametrize("mtp", [1, 2])
def test_kept_bytes_are_those_of_a_real_forward(pool_of: Pools, mtp: int) -> None:
    """Within the statistics of norms and what a loss keeps of single tokens, which are not counted."""
    without, predicting = (tiny_job("gpt", layers=2, mtp=layers, hidden=64, ffn=256, seq=64, **NO_DROPOUT) for layers in (0, mtp))
    [least], [most] = (pool_of(1).run(kept_by, job) for job in (without, predicting))
    shape = LayerShape.of(predicting)
    expected = predicting_bytes(shape) + shape.model.mtp * loss_kept_bytes(shape)
    assert most - least == pytest.approx(expected, rel=0.02)


def test_the_last_stage_alone_takes_longer_and_holds_more() -> None:
    for tensor in (1, 2):
        layout = {"layers": 4, "pipeline": 2, "tensor": tensor, "sequence_parallel": tensor > 1}
        usual, predicting = (tiny_job("llama", mtp=mtp, **layout) for mtp in (0, 1))
        profile = made_up_profile(predicting, link_s=1.0)
        head, end = head_of(profile, 1), last_end_of(profile, 1)
        layer_s = sum(profile.half(half).forward_s for half in profile.shape.halves)
        assert end.forward_s > 2 * head.forward_s + layer_s
        assert last_end_of(made_up_profile(usual, link_s=1.0), 1) == head_of(made_up_profile(usual, link_s=1.0), 1)
        first, last = (stage_parts(predicting, stage) for stage in (0, 1))
        assert first == stage_parts(usual, 0)
        assert last.at("loss").head > stage_parts(usual, 1).at("loss").head
        assert last.at("loss").total > stage_parts(usual, 1).at("loss").total
        assert last.at("backward").activations == stage_parts(usual, 1).at("backward").activations


def test_each_predicting_layer_is_a_layer_a_projection_and_a_head() -> None:
    usual, predicting = (tiny_job("llama", layers=4, mtp=mtp).model for mtp in (0, 2))
    head = 6 * usual.hidden * usual.vocab
    layer = (flops_per_token(usual) - head) // usual.layers
    assert flops_per_token(predicting) == flops_per_token(usual) + 2 * (layer + head + 6 * 2 * usual.hidden**2)
