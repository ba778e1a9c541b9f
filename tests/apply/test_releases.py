"""A release's table says what differs from the release before, and the script that records the next release agrees with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_lynx.apply import releases
from megatron_lynx.apply.releases import GONE, Release, hook_of, releases_in
from megatron_lynx.double_buffered import releases as without_flushes

from ..long import long
from ..nursery import process as nursery
from ..te_releases import folder_of, python_path

ROOT = Path(__file__).parents[2]
FILES = {
    "core": "megatron_lynx/apply/releases.json",
    "double_buffered": "megatron_lynx/double_buffered/releases.json",
    "transformer_engine": "megatron_lynx/apply/transformer_engine.json",
}


def test_the_next_release_is_this_one_but_for_its_differences(tmp_path):
    experts = {"m:router": "d", "m:lost": "l"}
    changes = {"experts": {"m:lost": GONE}, "te": {"m:te": "t"}}
    entries = {
        "1.0": {"fingerprints": {"m:same": "a", "m:changed": "b", "m:lost": "c"}, "only_with": {"experts": experts}},
        "1.1": {"fingerprints": {"m:changed": "B", "m:lost": GONE, "m:came": "e"}, "only_with": changes},
    }
    (tmp_path / "releases.json").write_text(json.dumps(entries))
    first, second = releases_in(tmp_path / "releases.json").values()
    assert second.fingerprints == {"m:same": "a", "m:changed": "B", "m:came": "e"}
    assert second.only_with == {"experts": {"m:router": "d"}, "te": {"m:te": "t"}}
    assert first.fingerprints["m:lost"] == "c"


def test_what_another_patch_release_has_holds_for_its_minor_release_only(tmp_path):
    entries = {
        "1.0": {"fingerprints": {"m:f": "a"}, "also": {"1.0.1": {"m:f": "b"}, "1.0.2": {"m:g": "c"}}},
        "1.1": {"fingerprints": {"m:h": "d"}},
    }
    (tmp_path / "releases.json").write_text(json.dumps(entries))
    first, second = releases_in(tmp_path / "releases.json").values()
    assert first == Release("1.0", {"m:f": "a"}, {}, {"m:f": "b", "m:g": "c"})
    assert second == Release("1.1", {"m:f": "a", "m:h": "d"})


@pytest.mark.parametrize("what", FILES)
def test_every_release_is_known_in_full(what):
    """The last entry of each file alone would be a table of what changed last."""
    known = {"core": releases.KNOWN, "double_buffered": without_flushes.KNOWN, "transformer_engine": releases.KNOWN_TE}[what]
    entries = json.loads((ROOT / FILES[what]).read_text())
    assert list(known) == list(entries)
    assert all(entry["recorded_from"].startswith(f"{version}.") for version, entry in entries.items())
    for release in known.values():
        assert len(release.fingerprints) >= len(entries[next(iter(entries))]["fingerprints"])
        assert GONE not in release.fingerprints.values()


@pytest.mark.parametrize(("core", "te"), [*long(("0.17", "2.14"), ("0.18", "2.20")), ("0.19", "2.17"), ("0.20", "2.20")])
@pytest.mark.slow
def test_the_script_records_what_is_known_of_megatron_core(core, te, tmp_path):
    folders = [folder_of("MEGATRON_CORE", core, "megatron/core"), folder_of("TRANSFORMER_ENGINE", te, "transformer_engine")]
    recorded_again("core", core, folders, tmp_path)


@pytest.mark.slow
def test_the_script_writes_nothing_that_it_could_not_read(tmp_path):
    """An entry without a table would mean that it is as in the release before."""
    done = recording("core", [], tmp_path)
    assert done.returncode == 1
    assert "Transformer Engine cannot be imported" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("core", [*long("0.17", "0.18"), "0.19"])
@pytest.mark.slow
def test_the_script_records_what_is_known_for_training_without_flushes(core, tmp_path):
    recorded_again("double_buffered", core, [folder_of("MEGATRON_CORE", core, "megatron/core")], tmp_path)


@pytest.mark.parametrize("te", [*long("2.14", "2.17"), "2.20"])
@pytest.mark.slow
def test_the_script_records_what_is_known_of_transformer_engine(te, tmp_path):
    recorded_again("transformer_engine", te, [folder_of("TRANSFORMER_ENGINE", te, "transformer_engine")], tmp_path)


def recorded_again(what: str, version: str, folders: list[Path], tmp_path: Path) -> None:
    """The file as it is, but for which patch release was read: those that tests run with may be others."""
    done = recording(what, folders, tmp_path)
    assert done.returncode == 0, done.stderr
    again, known = (json.loads(file.read_text()) for file in (tmp_path / "again.json", ROOT / FILES[what]))
    for entries in (again, known):
        del entries[version]["recorded_from"]
    assert json.dumps(again[version]) == json.dumps(known[version]), "in this order, too"
    assert again == known


def recording(what: str, folders: list[Path], tmp_path: Path) -> nursery.Ended:
    """The script, where these folders come first on the import path."""
    environment = {"PYTHONPATH": python_path(*folders, ROOT)}
    return nursery.run("scripts.record_release", what, "-o", str(tmp_path / "again.json"), environment=environment)


def test_every_function_has_a_hook_that_relies_on_it() -> None:
    """`megatron-lynx hooks` ended in a traceback where a table had functions of a module that no hook named."""
    for release in releases.KNOWN.values():
        for table in (release.fingerprints, *release.only_with.values()):
            assert all(hook_of(site) for site in table)
