"""The copies of a stage, on examples worked by hand. Layers take 1 s forward and 2 s backward, of which the attention is half."""

from __future__ import annotations

import pytest

from megatron_lynx.schedule.flushes import with_flushes
from megatron_lynx.stock.stage import CopiedLayer, with_copies


def walked(copy_s, *, layers=3, pipeline=1, microbatches=2, stage=0, exchange_s=None, ahead=True):
    layer = CopiedLayer(1.0, 1.0, 1.0, copy_s, leaves=10, copied=10)
    return with_copies([[layer] * layers], [*with_flushes(pipeline, microbatches).phases(stage)], exchange_s, ahead=ahead)


def test_copies_shorter_than_a_layer_cost_nothing():
    seconds, _ = walked(1.0)
    assert seconds["F", 0, "warmup"] == 3
    assert seconds["B", 0, "warmup"] == 6


def test_a_copy_longer_than_a_layer_is_exposed():
    """Forward ends at 3. Layer 1 goes out from 1 to 4, layer 2 from 4 to 7; layer 3 stays. In backward the attention of layer 3
    begins at 4 and asks for layer 2, which comes from 7 to 10 and is wanted at 6; layer 1 comes from 10 to 13."""
    seconds, _ = walked(3.0, microbatches=1)
    assert seconds["B", 0, "warmup"] == pytest.approx(14 - 3)


def test_a_stage_that_runs_ahead_of_its_backwards_keeps_no_top_layer():
    """Stage 0 of 2: forward 0, forward 1, backward 0 (the first, whose top layer stays), forward 2, backward 1, ..."""
    seconds, _ = walked(2.0, pipeline=2, microbatches=6)
    assert seconds["B", 0, "steady"] == 6, "a layer's backward is as long as its copy, and the top one comes behind the forward"
    assert walked(2.5, pipeline=2, microbatches=6)[0]["B", 0, "steady"] == pytest.approx(6 + 2 * 0.5)


def test_an_exchange_waits_for_copies_as_far_as_it_is_shorter():
    """The last layer's copy begins when the forward ends, and the exchange behind it synchronises the device."""
    assert walked(1.0, pipeline=2, microbatches=4, exchange_s=0.25)[0]["F", 0, "steady"] == pytest.approx(3 + 0.75)
    assert walked(1.0, pipeline=2, microbatches=4, exchange_s=1.0)[0]["F", 0, "steady"] == 3


def test_what_comes_back_on_demand_is_exposed():
    assert walked(1.0, microbatches=1, ahead=False)[0]["B", 0, "warmup"] == pytest.approx(6 + 3 * 1.0)


def test_bytes_on_the_device_follow_the_copies():
    """Of three layers the top one stays, and the one below it is on its way out or back: never all three at once."""
    assert walked(0.5, microbatches=1)[1] == 20
    assert walked(3.0, microbatches=1)[1] == 30, "copies that lag behind are still there"


def test_layers_that_offload_nothing_wait_for_nothing():
    plain = CopiedLayer(1.0, 1.0, 1.0)
    seconds, most_bytes = with_copies([[plain] * 3], [*with_flushes(1, 2).phases(0)])
    assert seconds["B", 0, "warmup"] == 6
    assert most_bytes == 0
