"""What training keeps of a device while others have it, and what they get."""

from __future__ import annotations

from megatron_lynx.estimate import estimate
from megatron_lynx.units import GIB
from tests.config.jobs import catalogued_job


def estimated(**budget):
    layout = {"tensor": 2, "distributed_optimizer": True}
    return estimate(catalogued_job("llama3-8b", "h100-80g", gpus=8, policy="full", parallel=layout, budget=budget))


def test_only_a_budget_that_speaks_of_others_says_what_stays() -> None:
    assert estimated().between is None
    assert estimated(memory_gib=60).between is None


def test_what_leaves_is_left_to_others() -> None:
    """Everything else of training stays: what one moves to the host the others get, to the byte."""
    stays, leaves = estimated(share=0.6).between, estimated(share=0.6, leaves=["parameters", "optimizer"]).between
    held = estimated(share=0.6).stages[0]
    assert leaves.left_bytes - stays.left_bytes == held.parameters + held.optimizer > 10 * GIB
    assert not {"parameters", "optimizer", "allocator", "activations"} & leaves.stays.keys()
    assert {"gradients", "context", "libraries", "nccl"} <= leaves.stays.keys()
    assert sum(leaves.stays.values()) + leaves.left_bytes == int(79.1 * GIB)


def test_it_is_said_in_one_line_and_in_json() -> None:
    answer = estimated(share=0.6, leaves=["parameters", "gradients", "optimizer"])
    said = answer.between.in_words
    assert said.startswith("between steps, with parameters, gradients, optimizer on the host: training keeps ")
    assert said.endswith(" GiB left to others")
    assert answer.as_json["between_steps"] == answer.between.as_json
