"""`scripts/apply_patches.sh`, on trees that hold as much of a release as its patch looks at."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATCHES = sorted((ROOT / "patches").glob("core_*/pretrain_gpt.patch"))


@pytest.fixture(params=PATCHES, ids=lambda patch: patch.parent.name)
def patch(request) -> Path:
    return request.param


@pytest.fixture
def checkout(patch, tmp_path) -> Path:
    """The lines around the change, at another place than in the release."""
    minor = patch.parent.name.rpartition("_")[2]
    facts = tmp_path / "megatron" / "core" / "package_info.py"
    facts.parent.mkdir(parents=True)
    facts.write_text(f"MAJOR = 0\nMINOR = {minor}\nPATCH = 1\n")
    hunk = patch.read_text().split("@@\n")[1].splitlines()
    context = [line[1:] for line in hunk if line.startswith(" ")]
    (tmp_path / "pretrain_gpt.py").write_text("import time\n" + "\n".join(context) + "\n")
    return tmp_path


def apply(*arguments: object) -> tuple[int, str]:
    command = [ROOT / "scripts" / "apply_patches.sh", *arguments]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_there_and_back(checkout):
    script = checkout / "pretrain_gpt.py"
    before = script.read_text()
    status, said = apply(checkout)
    patched = script.read_text()
    assert (status, ": patched (" in said) == (0, True)
    assert "    hold()\n" in patched
    compile(patched, "pretrain_gpt.py", "exec")
    status, said = apply(checkout)
    assert (status, "patched already" in said, script.read_text() == patched) == (0, True, True)
    for word in ("taken back", "not patched"):
        status, said = apply("--reverse", checkout)
        assert (status, word in said, script.read_text() == before) == (0, True, True)
    assert sorted(path.name for path in checkout.iterdir()) == ["megatron", "pretrain_gpt.py"], "nothing is left lying about"


def test_a_script_that_was_changed(checkout):
    script = checkout / "pretrain_gpt.py"
    changed = script.read_text().replace('if __name__ == "__main__":', 'if __name__ in ("__main__",):')
    script.write_text(changed)
    status, said = apply(checkout)
    assert (status, script.read_text()) == (1, changed)
    assert "does not fit" in said


def test_another_release(checkout):
    facts = checkout / "megatron" / "core" / "package_info.py"
    facts.write_text("MAJOR = 0\nMINOR = 99\n")
    status, said = apply(checkout)
    assert status == 2
    assert "found core_0_99, needed one of: core_0_16 core_0_17 core_0_18 core_0_19" in said


@pytest.mark.parametrize("arguments", [[], ["--help"], ["nowhere"]], ids=str)
def test_no_checkout(arguments):
    assert apply(*arguments)[0] == 2


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.parent.name)
def test_only_lines_of_ours(patch):
    """A header says why and how to drop it; nothing of Megatron's is taken away."""
    header, _, diff = patch.read_text().partition("--- a/")
    assert "Why: " in header
    assert "How to drop it: " in header
    assert not [line for line in diff.splitlines() if line.startswith("-")]
