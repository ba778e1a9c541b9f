"""Writes build/site_source, from which mkdocs builds the site of the documentation (`make docs`).

README, docs/, benchmarks/, CONTRIBUTING, CHANGELOG     as they are, with links that fit the site
commands/NAME.md                                        what `megatron-lynx NAME --help` prints
schema.md                                               each key of a plan file, from its JSON schema
api.md                                                  what `import megatron_lynx` offers, from signatures and docstrings
nav                                                     folders in mkdocs.yml become lists of their pages
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main
import yaml

import megatron_lynx
from megatron_lynx.cli import app
from megatron_lynx.plan.plan_file import plan_schema

ROOT = Path(__file__).parents[1]
SITE = ROOT / "build/site_source"
CONFIG = ROOT / "build/mkdocs.yml"
PICTURES = (".png",)
WIDTH = "100"
"""Columns of a command's help."""


def main() -> None:
    shutil.rmtree(SITE, ignore_errors=True)
    for source in sources():
        target = SITE / placed(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix in PICTURES:
            shutil.copy(source, target)
        else:
            target.write_text(linked(source, target), encoding="utf-8")
    pages = {"schema.md": schema(), "api.md": api()} | {f"commands/{name}.md": command(name) for name in commands()}
    for name, text in pages.items():
        (SITE / name).parent.mkdir(parents=True, exist_ok=True)
        (SITE / name).write_text(text, encoding="utf-8")
    CONFIG.write_text(yaml.safe_dump(config(), sort_keys=False), encoding="utf-8")


def sources() -> Iterator[Path]:
    """Pages and pictures of the repository."""
    yield from (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"))
    for folder in ("docs", "benchmarks/results"):
        yield from sorted(file for file in (ROOT / folder).rglob("*") if file.suffix in (".md", *PICTURES))


def placed(source: Path) -> Path:
    """Where a page is in the site: pages of docs/ at the top, the README as index."""
    name = source.relative_to(ROOT)
    if name == Path("README.md"):
        return Path("index.md")
    return name.relative_to("docs") if name.parts[0] == "docs" else name


def linked(source: Path, target: Path) -> str:
    """A page with links to other pages of the site; a link to anything else in the repository becomes its path."""
    known = {file.resolve(): SITE / placed(file) for file in sources()}

    def link(match: re.Match[str]) -> str:
        text, (path, _, anchor) = match[1], match[2].partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return match[0]
        meant = (source.parent / path).resolve()
        if meant.is_dir() and (meant / "README.md").exists():
            meant /= "README.md"
        if meant not in known:
            return text if text.startswith("`") else f"{text} (`{os.path.relpath(meant, ROOT)}`)"
        return f"[{text}]({os.path.relpath(known[meant], target.parent)}{'#' if anchor else ''}{anchor})"

    return re.sub(r"\[([^\]\n]*(?:\n[^\]\n]*)?)\]\(([^)\s]+)\)", link, source.read_text(encoding="utf-8"))


def commands() -> list[str]:
    return sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def command(name: str) -> str:
    """A page with a command's help."""
    words = [sys.executable, "-m", "megatron_lynx", name, "--help"]
    environment = {**os.environ, "COLUMNS": WIDTH, "TERM": "dumb"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    text = "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())
    return f"# megatron-lynx {name}\n\n```text\n$ megatron-lynx {name} --help\n{text}\n```\n"


def schema() -> str:
    """A page with every key of a plan file: its type, default and description."""
    described = plan_schema()
    lines = [
        "# Schema of plans",
        "",
        "`configs/plan.schema.json` has the same for editors. [The plan file](plan_file.md) explains it.",
    ]
    for name, part in [("Plan", described), *sorted(described["$defs"].items())]:
        if part.get("properties"):
            lines += ["", f"## {name}", "", *paragraph(part), "| key | type | default |", "|---|---|---|"]
            needed = part.get("required", [])
            for key, of_it in part["properties"].items():
                default = "required" if key in needed else f"`{of_it['default']}`" if of_it.get("default") is not None else ""
                lines.append(f"| `{key}` | {kind(of_it)} | {default} |")
    return "\n".join(lines) + "\n"


def paragraph(part: dict[str, Any]) -> list[str]:
    return [*part["description"].split("\n"), ""] if part.get("description") else []


def kind(part: dict[str, Any]) -> str:
    """A type in words."""
    if "$ref" in part:
        name = part["$ref"].split("/")[-1]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in part:
        return " or ".join(dict.fromkeys(kind(each) for each in part["anyOf"] if each.get("type") != "null"))
    if "enum" in part or "const" in part:
        return ", ".join(f"`{value}`" for value in part.get("enum", [part.get("const")]))
    if part.get("type") == "array":
        return f"list of {kind(part.get('items', {}))}" if part.get("items") else "list"
    return str(part.get("type", "any"))


def api() -> str:
    """A page with what the package offers."""
    lines = ["# Python", "", *(inspect.getdoc(megatron_lynx) or "").split("\n\n")[:1], ""]
    for name in megatron_lynx.__all__:
        thing = getattr(megatron_lynx, name)
        if not callable(thing):
            continue
        lines += [f"## {name}", "", "```python", f"{name}{signature(thing)}", "```", "", inspect.getdoc(thing) or "", ""]
        if inspect.isclass(thing) and thing.__module__.startswith("megatron_lynx.apply"):
            for method, function in inspect.getmembers(thing, inspect.isfunction):
                if not method.startswith("_"):
                    lines += [f"### {name}.{method}", "", inspect.getdoc(function) or "", ""]
    return "\n".join(lines)


def signature(thing: Any) -> str:
    return "" if inspect.isclass(thing) else str(inspect.signature(thing))


def config() -> dict[str, Any]:
    """mkdocs.yml for the written pages: paths of its folder, and folders as lists of pages."""
    read = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    return {**read, "docs_dir": str(SITE), "site_dir": str(ROOT / "build/site"), "nav": spread(read["nav"])}


def spread(entry: Any) -> Any:
    """A part of the navigation, with folders as lists of their pages."""
    if isinstance(entry, list):
        return [spread(each) for each in entry]
    if isinstance(entry, dict):
        return {title: spread(each) for title, each in entry.items()}
    if str(entry).endswith("/"):
        found = sorted(file.relative_to(SITE).as_posix() for file in (SITE / entry).glob("*.md"))
        return sorted(found, key=lambda name: not name.endswith("README.md"))
    return entry


if __name__ == "__main__":
    main()
