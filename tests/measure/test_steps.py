from __future__ import annotations

import pytest

from megatron_lynx.measure.measurement import Summary, summarise, time_alternating


def test_settings_take_turns_and_every_step_begins_at_a_barrier():
    said: list[str] = []
    steps = {name: lambda name=name: said.append(name) for name in "AB"}
    samples = time_alternating(steps, rounds=2, warmups=1, barrier=lambda: said.append("|"))
    assert "".join(said) == "|A|B" * 3
    assert {name: len(taken) for name, taken in samples.items()} == {"A": 2, "B": 2}
    assert all(seconds >= 0 for taken in samples.values() for seconds in taken)


def test_median_and_quartiles():
    assert summarise([5.0, 1.0, 2.0, 4.0, 3.0]) == Summary(median_s=3.0, lower_s=2.0, upper_s=4.0)
    assert summarise([2.0]) == Summary(2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="no samples"):
        summarise([])
