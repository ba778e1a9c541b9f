from __future__ import annotations

import json

import pytest

from megatron_lynx.errors import ConfigError
from megatron_lynx.measure.measurement import Links, RankResult, load_measurement, save_measurement, this_machine
from tests.measure.samples import MIB, measurement, setting


def test_round_trip(tmp_path):
    original = measurement()
    save_measurement(original, tmp_path / "measurement.json")
    assert load_measurement(tmp_path / "measurement.json") == original
    assert json.loads((tmp_path / "measurement.json").read_text())["version"] == 1


def test_keys_of_older_files_are_read(tmp_path):
    older = {"in_windows": "hidden_replays", "on_demand": "on_demand_replays", "filled": "filled_weight_gradients"}
    data = json.loads(measurement().model_dump_json()) | {"counter_check": {"counted_bytes": 5, "process_bytes": 6}}
    for rank in data["settings"][-1]["ranks"]:
        rank |= {"filled": 3}
        rank |= {name: rank.pop(now) for now, name in older.items()}
    (tmp_path / "measurement.json").write_text(json.dumps(data))
    figures = load_measurement(tmp_path / "measurement.json").settings[-1].figures
    assert (figures.in_windows, figures.on_demand, figures.filled) == (28, 4, 6)


def test_a_step_is_its_slowest_ranks_in_every_round():
    full = measurement().settings[1]
    assert full.step_samples_s == pytest.approx((1.4, 1.54, 2.8))
    assert (full.figures.resident_bytes, full.figures.peak_bytes) == (10 * MIB, 40 * MIB)


def test_ratio_and_exposed_refer_to_the_first_setting():
    whole = measurement()
    ours = whole.settings[-1]
    assert whole.ratio_to_none(ours) == pytest.approx(1.01)
    assert whole.exposed_s(ours) == pytest.approx(0.011)
    assert (ours.figures.in_windows, ours.figures.on_demand, ours.figures.on_demand_s) == (28, 4, 0.02)


@pytest.mark.parametrize(
    ("answers", "together"),
    [((True, True), True), ((True, False), False), ((None, False), False), ((True, None), None)],
)
def test_gradients_are_equal_only_if_all_ranks_say_so(answers, together):
    ranks = [RankResult(rank=i, step_s=(1.0,), resident_bytes=1, peak_bytes=1, gradients_equal=a) for i, a in enumerate(answers)]
    assert setting("x", 1.0, 1, 1).model_copy(update={"ranks": tuple(ranks)}).gradients_equal is together


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 2}', None])
def test_a_bad_file_is_a_config_error_that_names_it(tmp_path, content):
    path = tmp_path / "measurement.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_measurement(path)
    assert all("measurement.json" in problem.where for problem in caught.value.problems)


def test_all_problems_of_a_file_at_once(tmp_path):
    data = json.loads(measurement().model_dump_json())
    data["version"] = 2
    data["settings"][1]["ranks"][0]["step_s"] = []
    data["machine"]["colour"] = "blue"
    path = tmp_path / "m.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError) as caught:
        load_measurement(path)
    places = [problem.where.split(": ")[-1] for problem in caught.value.problems]
    assert {"version", "settings.1.ranks.0.step_s", "machine.colour"} <= set(places)


def test_this_machine_is_described():
    machine = this_machine(Links(kind="loopback"))
    assert machine.gpu is None
    assert machine.cores >= 1
    assert machine.cpu in str(machine)
    assert "loopback" in str(machine)
    assert machine.torch in str(machine)
