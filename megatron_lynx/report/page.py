"""The page itself: markup, styles and scripts from `assets/`, and the island, in one file.

    page.html   <!-- styles -->   *.css, in the order of STYLES
                <!-- island -->   the island's JSON
                <!-- scripts -->  *.js, in the order of SCRIPTS, one script in one scope

A content security policy in the page forbids every request, so that it works, and looks the same, without a network.
"""

from __future__ import annotations

import html
import json
import os
from pathlib import Path

from megatron_lynx.report.island import Island
from megatron_lynx.whole_file import write_whole

ASSETS = Path(__file__).parent / "assets"

STYLES = ("page", "schedule", "front", "table")
SCRIPTS = (
    *("format", "element", "theme", "range", "lane", "raster", "row", "schedule", "gestures", "overview", "details"),
    *("memory", "table", "scatter", "plans", "tiles", "main"),
)
"""By their order: a script uses those before it."""


def write_page(island: Island, path: str | os.PathLike[str]) -> None:
    """Write the page, whole or not at all. Raises ConfigError where it cannot be written."""
    write_whole(path, page(island))


def page(island: Island) -> str:
    """The page as text."""
    scripts = "\n".join(_asset(f"{name}.js") for name in SCRIPTS)
    parts = {
        "title": html.escape(f"{island['title']} - megatron-lynx report"),
        "styles": f"<style>\n{''.join(_asset(f'{name}.css') for name in STYLES)}</style>",
        "island": f'<script id="island" type="application/json">{_inside_script(island)}</script>',
        "scripts": f'<script>\n"use strict";\n(() => {{\n{scripts}\n}})();\n</script>',
    }
    text = _asset("page.html")
    for name, content in parts.items():
        before, after = text.split(f"<!-- {name} -->")
        text = before + content + after
    return text


def _inside_script(island: Island) -> str:
    """JSON that cannot end the script element that it is in, whatever names are in it."""
    return json.dumps(island, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
