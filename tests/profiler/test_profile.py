"""The profile file: exact round trip, straight lines between messages, refusals."""

from __future__ import annotations

import json

import pytest

from megatron_lynx.errors import ConfigError
from megatron_lynx.profiler.profile import LinkPoint, load_profile, save_profile
from tests.profiler.made_up import made_up_host_time, made_up_layer_host_time, made_up_profile
from tests.tiny_jobs import tiny_job


def with_links(*points: tuple[int, float]):
    links = tuple(LinkPoint(kind="all_reduce", bytes=size, seconds=seconds) for size, seconds in points)
    return made_up_profile(tiny_job(tensor=2), links=links)


def test_a_saved_profile_reads_back_the_same(tmp_path):
    profile = made_up_profile(tiny_job("llama", tensor=2), link_s=1e-9 / 3)
    save_profile(profile, tmp_path / "profile.yaml")
    again = load_profile(tmp_path / "profile.yaml")
    assert again == profile
    assert again.digest == profile.digest
    (tmp_path / "profile.json").write_text(profile.model_dump_json())
    assert load_profile(tmp_path / "profile.json") == profile


def test_every_problem_of_a_file_is_listed(tmp_path):
    profile = made_up_profile(tiny_job(tensor=2)).model_dump(mode="json")
    profile["version"], profile["attention"]["input_bytes"], profile["colour"] = 2, -1, "red"
    (tmp_path / "p.yaml").write_text(__import__("json").dumps(profile))
    with pytest.raises(ConfigError) as refusal:
        load_profile(tmp_path / "p.yaml")
    assert {problem.where.rpartition(": ")[2] for problem in refusal.value.problems} >= {
        "version",
        "attention.input_bytes",
        "colour",
    }


@pytest.mark.parametrize(
    ("size", "seconds"),
    [(50, 1.0), (100, 1.0), (150, 1.5), (200, 2.0), (300, 6.0), (400, 10.0), (500, 14.0)],
    ids=["all latency", "first", "between", "second", "between", "last", "beyond"],
)
def test_messages_lie_on_the_lines_between_measured_ones(size, seconds):
    assert with_links((400, 10.0), (100, 1.0), (200, 2.0)).link_s("all_reduce", size) == pytest.approx(seconds)


def test_one_point_is_bandwidth_and_no_point_costs_nothing():
    profile = with_links((100, 1.0))
    assert profile.link_s("all_reduce", 250) == pytest.approx(2.5)
    assert profile.link_s("p2p", 250) == 0


def test_a_profile_of_half_a_layer_is_refused():
    profile = made_up_profile(tiny_job())
    fewer = dict(profile.mlp.items)
    del fewer["activation"]
    with pytest.raises(ValueError, match=r"mlp\.items"):
        made_up_profile(tiny_job(), mlp=profile.mlp.model_copy(update={"items": fewer}))


def test_names_and_figures_that_a_layer_cannot_have_are_refused_by_place(tmp_path):
    profile = with_links((100, 1.0), (200, 2.0)).model_dump(mode="json")
    profile["mlp"]["tensors"][0] |= {"made_by": "zork", "saved_by": ["linear_qkv"]}
    profile["links"].append(profile["links"][0])
    (tmp_path / "p.yaml").write_text(json.dumps(profile))
    with pytest.raises(ConfigError) as refusal:
        load_profile(tmp_path / "p.yaml")
    made, saved, twice = map(str, refusal.value.problems)
    assert "mlp.tensors.0.made_by is 'zork', needed one of input, pre_mlp_layernorm" in made
    assert "mlp.tensors.0.saved_by has 'linear_qkv', needed some of pre_mlp_layernorm" in saved
    assert "all_reduce of 100 bytes is given twice, needed once" in twice


def test_seconds_without_end_are_refused(tmp_path):
    text = json.dumps(with_links((100, 1.0)).model_dump(mode="json")).replace('"seconds": 1.0', '"seconds": 1e400')
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"links\.0\.seconds: found inf, needed a finite number"):
        load_profile(tmp_path / "p.yaml")


def test_host_time_reads_back_the_same(tmp_path):
    profile = made_up_profile(tiny_job(), host_time=made_up_host_time(1 / 3))
    save_profile(profile, tmp_path / "profile.yaml")
    again = load_profile(tmp_path / "profile.yaml")
    assert again == profile
    assert again.host_time.of("local").mlp.under("recomputed").seconds.backward_s == pytest.approx(400e-6)


def test_a_profile_from_before_host_time_is_read_and_keeps_its_digest(tmp_path):
    profile = made_up_profile(tiny_job())
    old = profile.model_dump(mode="json")
    del old["host_time"]
    (tmp_path / "old.yaml").write_text(json.dumps(old))
    assert load_profile(tmp_path / "old.yaml").host_time is None
    assert load_profile(tmp_path / "old.yaml").digest == made_up_profile(tiny_job(), host_time=made_up_host_time()).digest


def test_host_time_that_cannot_be_is_refused_by_place(tmp_path):
    profile = made_up_profile(tiny_job(), host_time=made_up_host_time()).model_dump(mode="json")
    profile["host_time"]["local"]["mlp"]["kept"]["forward_us"] = -1
    del profile["host_time"]["local"]["attention"]["full"]
    profile["host_time"]["local"]["attention"]["gathered"] = None
    (tmp_path / "p.yaml").write_text(json.dumps(profile))
    with pytest.raises(ConfigError) as refusal:
        load_profile(tmp_path / "p.yaml")
    missing, negative = sorted(map(str, refusal.value.problems))
    assert "host_time.local.attention.full: found nothing, needed this key" in missing
    assert "host_time.local.mlp.kept.forward_us: found -1, needed at least 0" in negative


def test_what_was_not_measured_counts_as_the_nearest_setting():
    half = made_up_layer_host_time().mlp.model_copy(update={"gathered": None, "offloaded": None, "deferred": None})
    assert half.under("gathered") == half.recomputed
    assert half.under("offloaded") == half.under("deferred") == half.kept
