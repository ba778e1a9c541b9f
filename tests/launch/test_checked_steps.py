"""The parts of a checked step: what is read once, what is put back, and what counts as a difference."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

from megatron_lynx.launch.check import Outcome, backward_position, differences, named_parameters, stock
from megatron_lynx.launch.launch import arguments_against
from megatron_lynx.launch.training_state import DataIterators, TrainingState
from tests.tiny_jobs import tiny_job
from tests.uniform import uniform_plan


def reading(count):
    """A data set that draws random numbers while it is read."""
    for index in range(count):
        yield {"tokens": torch.rand(2), "number": index}


def test_what_a_step_reads_is_read_once():
    torch.manual_seed(1)
    source = reading(3)
    iterators = DataIterators(source)
    before = torch.get_rng_state()
    first = [(next(iterators.stand_in), torch.rand(1)) for _ in range(2)]
    first[0][0]["tokens"].zero_()  # a forward step may change its batch
    torch.set_rng_state(before)
    iterators.again()
    second = [(next(iterators.stand_in), torch.rand(1)) for _ in range(2)]
    assert next(source)["number"] == 2
    assert torch.equal(first[1][0]["tokens"], second[1][0]["tokens"])
    assert second[0][0]["tokens"].any()
    assert [drawn for _, drawn in first] == [drawn for _, drawn in second], "reading drew its numbers both times"


def test_iterators_of_chunks_and_of_ranks_that_read_nothing():
    source = reading(2)
    assert DataIterators(None).stand_in is None
    one, other, none = DataIterators([source, source, None]).stand_in
    assert one is other
    assert none is None


def test_a_read_that_ends_ends_again():
    iterators = DataIterators(reading(1))
    for _ in range(2):
        assert next(iterators.stand_in)["number"] == 0
        with pytest.raises(StopIteration):
            next(iterators.stand_in)
        iterators.again()


class Scaled(nn.Module):
    """Saves its scales as Transformer Engine's modules do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.history = torch.zeros(2)

    def get_extra_state(self):
        return {"history": self.history}

    def set_extra_state(self, state):
        self.history.copy_(state["history"])


@dataclass
class Entry:
    values: torch.Tensor
    group: object


def test_all_that_a_pass_changes_is_put_back(monkeypatch):
    from megatron.core import rerun_state_machine
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    model, machine, group = Scaled(), SimpleNamespace(validation_counts={}, rerun_requested=False), object()
    routers, predicted = {"aux": {"values": torch.ones(2), "reduce_group": group}}, {"entry": Entry(torch.ones(1), group)}
    monkeypatch.setattr(moe_utils, "_MOE_LAYER_WISE_LOGGING_TRACKER", routers)
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", predicted)
    monkeypatch.setattr(rerun_state_machine, "_GLOBAL_RERUN_STATE_MACHINE", machine)

    def a_pass():
        model.count += 1
        model.history += 1
        routers["aux"]["values"] += 1
        predicted["entry"].values += 1
        predicted["another"] = 1
        machine.validation_counts["loss"] = 1
        machine.rerun_requested = True
        return random.random(), float(numpy.random.rand()), float(torch.rand(1))

    before = TrainingState([model])
    drawn = []
    for _ in range(2):
        drawn.append(a_pass())
        before.restore()
    assert drawn[0] == drawn[1]
    assert (model.count, model.history.sum()) == (0, 0)
    assert routers["aux"]["values"].tolist() == [1, 1]
    assert predicted["entry"].values == 1
    assert predicted["entry"].group is routers["aux"]["reduce_group"] is group
    assert list(predicted) == ["entry"]
    assert vars(machine) == {"validation_counts": {}, "rerun_requested": False}


def a_model():
    """Layers 3 and 4 of a model."""
    layers = nn.ModuleList()
    for number in (3, 4):
        layer = nn.ModuleDict({"linear_qkv": nn.Linear(2, 2, bias=False), "linear_proj": nn.Linear(2, 2, bias=False)})
        layer.layer_number = number
        layers.append(layer)
    model = nn.ModuleDict({"decoder": nn.ModuleDict({"layers": layers}), "output_layer": nn.Linear(2, 2, bias=False)})
    for value, parameter in enumerate(model.parameters()):
        parameter.main_grad = torch.full((2, 2), float(value))
    return model


def found(one, other, **tolerances):
    return differences(one, other, rank=3, stage=1, names=("stock", "the plan"), tolerances=tolerances)


def test_the_first_difference_is_the_one_that_backward_meets_first():
    model = a_model()
    before = Outcome.of([{"lm loss": torch.tensor([1.0, 2.0])}], [model]).on_host()
    assert found(before, Outcome.of([{"lm loss": torch.tensor([1.0, 2.0])}], [model])) == []
    for parameter in list(model.parameters())[:4]:
        parameter.main_grad[0, 1] += 1
    names = [difference.name for difference in found(before, Outcome.of([{"lm loss": torch.tensor([1.0, 2.5])}], [model]))]
    assert names == [
        "the loss of micro-batch 0",
        "decoder.layers.3.linear_proj.weight",
        "decoder.layers.3.linear_qkv.weight",
        "decoder.layers.2.linear_proj.weight",
        "decoder.layers.2.linear_qkv.weight",
    ]


def test_a_difference_in_words():
    model = a_model()
    before = Outcome.of((), [model]).on_host()
    dict(named_parameters([model]))["output_layer.weight"].main_grad[1, 1] = 4.5
    (difference,) = found(before, Outcome.of(None, [model]))
    assert difference.place == "output_layer.weight on stage 1 (rank 3)"
    assert difference.values == "1 of 4 values that differ, most 4 in stock and 4.5 in the plan"


@pytest.mark.parametrize(
    ("one", "other", "differ"),
    [
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), False),
        (torch.tensor([0.0]), torch.tensor([-0.0]), True),
        (torch.tensor([1.0]), torch.tensor([float("nan")]), True),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.bfloat16), True),
        (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1.0], dtype=torch.bfloat16), False),
        (None, torch.tensor([0.0]), True),
        (None, None, False),
    ],
    ids=["NaN", "sign of zero", "NaN here", "another type", "bf16", "absent", "both absent"],
)
def test_what_counts_as_different(one, other, differ):
    parameter = {"weight": (2, 0)}
    assert bool(found(Outcome((), {"weight": one}, parameter), Outcome((), {"weight": other}, parameter))) == differ


@pytest.mark.parametrize(("value", "differ"), [(8.0625, False), (8.1, True), (float("nan"), True)])
def test_what_may_differ_is_measured_by_the_largest_value(value, differ):
    """A sum in another order is off by as much where it is near 0."""
    stock, planned = (Outcome((), {"weight": torch.tensor([last, 0.0])}, {"weight": (1, 0)}) for last in (8.0, value))
    planned.gradients["weight"][1] = 1e-3
    assert bool(found(stock, planned, weight=2.0**-7)) == differ
    assert found(stock, planned)


def test_tied_embeddings_come_last():
    """The first stage's gradient of the embedding is added to the last stage's: whatever is wrong in between shows in it."""
    tied = nn.Parameter(torch.zeros(1))
    tied.shared_embedding = True
    first_layer = backward_position("decoder.layers.0.input_layernorm.weight", nn.Parameter(torch.zeros(1)))
    assert backward_position("output_layer.weight", tied) > first_layer


def test_full_recomputation_is_lent_to_a_pass():
    config = SimpleNamespace(recompute_granularity=None, recompute_method=None, recompute_num_layers=None, timers="timers")
    model = nn.Sequential(nn.Linear(1, 1))
    model.config = config
    before = dict(vars(config))
    with suppress(KeyError), stock("full", [model]):
        assert vars(config) == {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
            "timers": None,
        }
        raise KeyError
    assert vars(config) == before
    with stock("none", [model]):
        assert vars(config) == {**before, "timers": None}


def test_a_plan_without_flushes_is_not_checked():
    """Its schedule leaves a step with micro-batches in flight."""
    plan = uniform_plan(tiny_job("gpt"))
    unlike = {problem.where for problem in arguments_against(plan, SimpleNamespace(lynx_check=2))}
    buffered = plan.model_copy(update={"schedule": "double_buffered"})
    args = SimpleNamespace(lynx_check=2, lynx_schedule="double-buffered")
    assert {problem.where for problem in arguments_against(buffered, args)} - unlike == {"--lynx-check"}
