"""A release's table says what differs from the release before, and the script that drafts the next table agrees with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_lynx.apply.inventory import hook_of
from megatron_lynx.apply.releases import KNOWN
from megatron_lynx.apply.releases.release import GONE, Release

from ..long import long
from ..nursery import process as nursery
from ..te_releases import folder_of, python_path

ROOT = Path(__file__).parents[2]
CORE = ROOT / "megatron_lynx/apply/releases/core.py"
WITHOUT_FLUSHES = ROOT / "megatron_lynx/double_buffered/releases.py"
TE = ROOT / "megatron_lynx/apply/transformer_engine/releases.py"


def test_the_next_release_is_this_one_but_for_what_is_said():
    first = Release("1.0", {"m:same": "a", "m:changed": "b", "m:lost": "c"}, {"experts": {"m:router": "d", "m:lost": "l"}})
    second = first.then(
        "1.1", fingerprints={"m:changed": "B", "m:lost": GONE, "m:came": "e"}, experts={"m:lost": GONE}, te={"m:te": "t"}
    )
    assert second.fingerprints == {"m:same": "a", "m:changed": "B", "m:came": "e"}
    assert second.only_with == {"experts": {"m:router": "d"}, "te": {"m:te": "t"}}
    assert first.fingerprints["m:lost"] == "c"


@pytest.mark.parametrize(("core", "te"), [*long(("0.17", "2.14"), ("0.18", "2.20")), ("0.19", "2.17")])
@pytest.mark.slow
def test_the_script_drafts_what_is_recorded_of_megatron_core(core, te):
    folders = [folder_of("MEGATRON_CORE", core, "megatron/core"), folder_of("TRANSFORMER_ENGINE", te, "transformer_engine")]
    assert without_source(drafted(folders)) in without_source(CORE.read_text())


@pytest.mark.slow
def test_the_script_says_what_it_could_not_read():
    """Nothing about a table would mean that it is as in the release before."""
    draft = drafted([])
    assert "# te: not read, because Transformer Engine cannot be imported" in draft
    fingerprints = re.search(r"    fingerprints=\{.*?\n    \},\n", draft, re.DOTALL)[0]
    assert fingerprints in CORE.read_text()


@pytest.mark.parametrize("core", [*long("0.17", "0.18"), "0.19"])
@pytest.mark.slow
def test_the_script_drafts_what_is_recorded_for_training_without_flushes(core):
    draft = drafted([folder_of("MEGATRON_CORE", core, "megatron/core")], "double_buffered")
    assert without_source(draft) in without_source(WITHOUT_FLUSHES.read_text())


@pytest.mark.parametrize("te", [*long("2.14", "2.17"), "2.20"])
@pytest.mark.slow
def test_the_script_drafts_what_is_recorded_of_transformer_engine(te):
    draft = drafted([folder_of("TRANSFORMER_ENGINE", te, "transformer_engine")], "transformer_engine")
    assert without_source(draft) in without_source(TE.read_text())


def drafted(folders: list[Path], *words: str) -> str:
    """What the script prints where these folders come first on the import path."""
    done = nursery.run("scripts.record_release", *words, environment={"PYTHONPATH": python_path(*folders, ROOT)})
    assert done.returncode == 0, done.stderr
    return done.stdout


def without_source(text: str) -> str:
    """The text without the third number of versions: what is tested against need not be the patch release that was recorded."""
    return re.sub(r"# recorded from .*", "", text)


def test_every_function_has_a_hook_that_relies_on_it() -> None:
    """`megatron-lynx hooks` ended in a traceback where a table had functions of a module that no hook named."""
    for release in KNOWN.values():
        for table in (release.fingerprints, *release.only_with.values()):
            assert all(hook_of(site) for site in table)
