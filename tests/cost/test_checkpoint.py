"""What a layer costs that keeps its input alone: bytes from forward to backward, bytes and seconds when it runs again."""

from __future__ import annotations

import pytest

from megatron_lynx.anatomy import ATTENTION, MLP
from megatron_lynx.config.job import Job
from megatron_lynx.config.loader import job_path, load_job
from megatron_lynx.cost.communication import window_lengths_s
from megatron_lynx.cost.memory import COLUMNS, peak_bytes
from megatron_lynx.cost.moments import less_in_hand_bytes
from megatron_lynx.cost.recompute import Checkpoint
from megatron_lynx.cost.section import PricedSection, priced
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.profile import Profile

FEEDS, FED = Checkpoint(feeds=True), Checkpoint(fed=True)


def of(name: str) -> tuple[Job, Profile]:
    job = load_job(job_path(f"jobs/{name}"))
    return job, analytic_profile(job)


def both(profile: Profile) -> tuple[PricedSection, PricedSection]:
    attention, mlp = (priced(profile, section, each.items(section), each) for section, each in ((ATTENTION, FEEDS), (MLP, FED)))
    return attention, mlp


def test_all_of_a_layer_is_there_at_once() -> None:
    """Between forward and backward a layer holds one input; when its MLP half runs backward, all that it saves."""
    _, profile = of("llama3-8b-a100-80g")
    attention, mlp = both(profile)
    one_input = profile.attention.input_bytes
    assert (attention.memory.resident, mlp.memory.resident) == (one_input, 0)
    kept = profile.attention.saved_bytes + profile.mlp.saved_bytes
    assert attention.memory.whole + mlp.memory.whole == kept
    layers = 4
    backward = (mlp.memory, attention.memory) * layers
    assert peak_bytes(backward, 1) == (layers - 1) * one_input + kept
    assert peak_bytes(backward, 3) == (3 * layers - 1) * one_input + kept


def test_what_communicates_again_takes_its_time() -> None:
    """Under sequence parallelism each half gathers again; the attention half's sum is scattered again, the MLP half's is not."""
    job, profile = of("llama3-70b-h800-80g")
    assert job.parallel.sequence_parallel
    attention, mlp = both(profile)
    gather_s, scatter_s = window_lengths_s(profile, "fwd", ATTENTION, profile.message_bytes)
    assert attention.communicates_s == pytest.approx(gather_s + scatter_s)
    assert mlp.communicates_s == pytest.approx(window_lengths_s(profile, "fwd", MLP, profile.message_bytes)[0])
    items = profile.attention.items
    assert attention.recompute_s == pytest.approx(sum(item.forward_s for item in items.values()))
    assert mlp.recompute_s == pytest.approx(
        sum(profile.mlp.items[name].forward_s for name in ("pre_mlp_layernorm", "linear_fc1", "activation"))
    )


def test_tokens_travel_again_and_routers_decide_once() -> None:
    job, profile = of("qwen3-30b-a3b-h100-80g")
    assert job.model.experts is not None
    assert profile.experts is not None
    section = job.model.experts.section
    half, fed = (priced(profile, section, each.items(section), each) for each in (Checkpoint(), FED))
    assert half.communicates_s == profile.experts.exchange_s, "to the experts, and not back"
    tokens, choices = 2 * 4096, 8
    scores, decided, chosen = tokens * 128 * 4, tokens * 128 * 3, tokens * choices * (2 * 8 + 4)
    assert fed.memory.resident == scores + decided + chosen + tokens * choices * 8
    assert half.memory.resident == fed.memory.resident + profile.experts.input_bytes


def test_what_is_in_hand_is_counted_half_by_half() -> None:
    """It once was counted as the half has it that needs most: a plan that was fullest in the other half held less than it said,
    and what a run taught of it was false of the next plan."""
    job, profile = of("llama3-8b-a100-80g")
    less = less_in_hand_bytes(job)
    assert min(less.values()) == 0 < max(less.values())
    for name, section in job.model.halves.items():
        memory = priced(profile, section, (), None, less[name]).memory
        assert memory.columns[COLUMNS.index("begins")] == memory.whole - less[name]
    bounded = job.budget.model_copy(update={"activation_mib": 100.0})
    assert not less_in_hand_bytes(job.model_copy(update={"budget": bounded})), "a bound on layers is not about what is in hand"
