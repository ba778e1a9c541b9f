"""The stand-in comes and goes without a trace, and what it says of random numbers is what tensors really draw."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import ProcessGroup, Work

from megatron_lynx.errors import ConfigError
from megatron_lynx.testbed import cpu_device
from megatron_lynx.testbed.cpu_device import stand_in_for_cuda
from tests.instruments.tensor_types import stand_in_for_tensor_types


def everything():
    """Every attribute of the places where the stand-in replaces something."""
    owners = (torch, torch.cuda, torch.cuda.random, torch.Tensor, torch.nn.Module, ProcessGroup, Work)
    return [dict(vars(owner)) for owner in owners]


def test_removal_restores_the_identical_objects():
    before = everything()
    with stand_in_for_cuda():
        assert everything() != before
        stand_in_for_cuda().close()  # a second one neither adds nor removes anything
        assert torch.zeros(2, device="cuda").device.type == "cpu"
    for was, now in zip(before, everything(), strict=True):
        assert was.keys() == now.keys()
        assert all(was[name] is now[name] for name in was)


@pytest.mark.parametrize("place", ["cuda", "cuda:0", torch.device("cuda", 1)])
def test_what_is_put_on_cuda_stays_on_the_cpu(place):
    with stand_in_for_cuda():
        made = [
            torch.empty(2, device=place),
            torch.tensor([1.0], dtype=torch.float64, device=place, pin_memory=True),
            torch.full((2,), 3, device=place),
            torch.ones(2).to(place),
            torch.ones(2).to(place, torch.bfloat16),
            torch.ones(2).to(device=place),
            torch.ones(2).cuda(),
            torch.nn.Linear(2, 2).to(place).weight,
            torch.zeros_like(torch.ones(2), device=torch.cuda.current_device()),
        ]
        assert {tensor.device for tensor in made} == {torch.device("cpu")}
        assert made[4].dtype == torch.bfloat16
        with stand_in_for_tensor_types():
            assert torch.ones(2).type() == "torch.cuda.FloatTensor"
            assert torch.ones(2).type(torch.int8).dtype == torch.int8


def test_cuda_state_is_the_state_that_dropout_draws_from():
    """Without `manual_seed` and `_lazy_call` answered Megatron raises nothing and draws wrong numbers."""
    with stand_in_for_cuda():
        torch.cuda.manual_seed(5)
        state = torch.cuda.get_rng_state()
        first = torch.nn.functional.dropout(torch.ones(64), 0.5)
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.nn.functional.dropout(torch.ones(64), 0.5), first)
        ran = []
        torch.cuda._lazy_call(lambda: ran.append(True))
        assert ran == [True]


def test_refused_where_there_is_a_gpu(monkeypatch):
    before = everything()
    monkeypatch.setattr(cpu_device.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cpu_device.torch.cuda, "get_device_name", lambda: "H100")
    with pytest.raises(ConfigError, match=r"found a GPU \(H100\).*CUDA_VISIBLE_DEVICES"):
        stand_in_for_cuda()
    monkeypatch.undo()
    assert everything() == before
