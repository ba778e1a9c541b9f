from __future__ import annotations

import pytest

from megatron_lynx.compare import as_json, verdict
from tests.measure.samples import MIB, measurement, setting


def test_rows_as_the_command_prints_them():
    rows = as_json(measurement())["rows"]
    assert rows[-1] == {
        "setting": "ours in windows",
        "step_s": pytest.approx(1.111),
        "ratio_to_none": pytest.approx(1.01),
        "activation_bytes": 18 * MIB,
        "peak_bytes": 70 * MIB,
        "exposed_s": pytest.approx(0.011),
        "on_demand_s": 0.02,
        "offloaded_bytes": 0,
        "host_bytes": 0,
        "exposed_copy_s": 0.0,
        "gradients_equal": True,
    }
    assert (rows[0]["ratio_to_none"], rows[0]["exposed_s"], rows[0]["gradients_equal"]) == (1.0, 0.0, None)


def test_the_opponent_is_the_fastest_stock_setting_of_no_more_bytes():
    settings = measurement().settings
    resident, peak = verdict(settings, "resident_bytes"), verdict(settings, "peak_bytes")
    assert " stock block-2 (" in peak  # 60 <= 70 MiB; of resident bytes it has 50 > 18 MiB
    assert resident == (
        "ours in windows (1.11 s, 18.00 MiB) is 1.39 times as fast as stock full (1.54 s, 10.00 MiB), "
        "the fastest stock setting of no more activation bytes."
    )


def test_a_lost_comparison_is_said_so():
    lost = verdict((setting("stock none", 1.0, 5, 5), setting("ours", 1.25, 5, 5, ours=True)))
    assert "is slower, by a factor of 1.25, than stock none" in lost


@pytest.mark.parametrize("ours_s", [0.997, 1.003])
def test_steps_that_are_equal_to_two_digits_are_not_called_slower(ours_s: float) -> None:
    """It was said: slower, by a factor of 1.00."""
    assert "is as fast as stock none" in verdict((setting("stock none", 1.0, 5, 5), setting("ours", ours_s, 5, 5, ours=True)))


def test_without_a_stock_setting_as_small_nobody_wins():
    alone = verdict((setting("stock none", 1.0, 9, 9), setting("ours", 1.0, 5, 5, ours=True)))
    assert alone.startswith("No stock setting that was measured needs as few activation bytes as ours")
    assert verdict((setting("stock none", 1.0, 9, 9),)) is None
