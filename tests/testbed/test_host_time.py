"""Measuring host time: every setting of real layers, its plans installed and removed. No figure is compared with a clock's."""

from __future__ import annotations

import pytest

from megatron_lynx.anatomy import HALVES
from megatron_lynx.config.cluster import HostTime, LayerHostTime
from megatron_lynx.timeline import Passes
from scripts.measure_host_time import measured_here
from tests.te_releases import folder_of

LESS_AND_MORE = (
    ("none", "kept"),
    ("kept", "partly"),
    ("kept", "recomputed"),
    ("kept", "offloaded"),
    ("kept", "deferred"),
    ("recomputed", "gathered"),
)
"""Of two settings the second issues everything that the first does."""


@pytest.fixture(scope="module")
def known() -> HostTime:
    return measured_here(["local"], rounds=3)


@pytest.fixture(scope="module")
def measured(known: HostTime) -> LayerHostTime:
    return known.of("local")


def test_every_setting_takes_some_time_and_more_work_no_less(measured: LayerHostTime) -> None:
    for half in map(measured.half, HALVES):
        assert all(getattr(half, setting).backward_us > 0 for setting in type(half).model_fields)
        for less, more in LESS_AND_MORE:
            assert half.under(less).forward_us <= half.under(more).forward_us
            assert half.under(less).backward_us <= half.under(more).backward_us


def test_figures_say_what_they_were_taken_on(known: HostTime) -> None:
    assert known.cpu
    assert known.measured == ("local",)
    assert "local layers, least of 3 steps" in known.of("local").made_by


@pytest.mark.long
def test_transformer_engines_layers_say_that_their_kernels_are_stood_in_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder_of("TRANSFORMER_ENGINE", "2.17", "transformer_engine")))
    known = measured_here(["transformer_engine"], rounds=1)
    assert known.measured == ("transformer_engine",)
    assert "transformer_engine layers, a stand-in for Transformer Engine's kernels, " in known.of("transformer_engine").made_by


def test_seconds_are_added_and_shared_out_pass_by_pass() -> None:
    spent = Passes(2.0, 6.0) * Passes(0.5, 0.25) + Passes(1.0, 1.0) - Passes(0.5, 0.0)
    assert spent == Passes(1.5, 2.5)
    assert spent.at_least(Passes(2.0, 2.0)) == Passes(2.0, 2.5)
