"""What the README says is so: its commands, its files, its numbers' origin."""

from __future__ import annotations

import re
from pathlib import Path

import typer.main

from megatron_lynx.cli import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def test_commands_are_those_that_exist() -> None:
    named = set(re.findall(r"^(?:\| `|    )megatron-lynx ([a-z]+)", README, re.MULTILINE))
    existing = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert named == existing


def test_make_targets_exist() -> None:
    for target in re.findall(r"make ([a-z]+)", README):
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target


def test_files_it_points_to_exist() -> None:
    links = [target for target in re.findall(r"\]\(([^)#]+)\)", README) if not target.startswith("http")]
    named = re.findall(r"`((?:configs|scripts|benchmarks|docs)/[\w./-]+)`", README)
    assert links
    for path in [*links, *named]:
        assert (ROOT / path).exists(), path
    for job in re.findall(r"jobs/[\w-]+", README):
        assert (ROOT / "configs" / f"{job}.yaml").exists(), job


def test_the_plan_it_shows_is_a_plan(tmp_path: Path) -> None:
    from megatron_lynx.plan.plan import Stage
    from megatron_lynx.yaml_file import read_yaml

    shown = next(block for block in re.findall(r"```yaml\n(.*?)```", README, re.DOTALL) if "stages:" in block)
    path = tmp_path / "plan.yaml"
    path.write_text(shown)
    Stage.model_validate(read_yaml(path)["stages"][0])
