"""Counts habits of prose that stop a Megatron engineer, in the package's docstrings and comments and in pages.

    python -m scripts.prose             figures, and the files with most
    python -m scripts.prose --store     lowers the stored figures (scripts/prose.json) to today's; it never raises them

A figure is the number of matches in 1,000 words. Some matches are right; a test demands that the figures do not rise.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import math
import re
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
STORED = Path(__file__).with_suffix(".json")
VERBS = "is|are|was|were|has|have|had|would|may|can|could|must|holds?|comes?|stays?|runs?|made|makes|takes?|becomes?|remains?"
PRONOUNS = "it|they|he|a|an|the|of|one|some|each|all|no|this|that|these|those|Megatron|stock|ours|plans?"
HABITS: Mapping[str, re.Pattern[str]] = {
    "a clause in place of a noun (what it holds)": re.compile(rf"\bwhat(?:ever)? (?:{VERBS}|{PRONOUNS})\b", re.I),
    "nobody, whoever as actors": re.compile(r"\b(?:nobody|somebody|anybody|everybody|whoever|whom)\b", re.I),
    "behind for after": re.compile(
        r"\b(?:comes?|runs?|right|begins?|just|directly) behind\b|\bbehind (?:it|that|them|these|those|which|each other)\b", re.I
    ),
    "a paraphrase of the field's word": re.compile(
        r"\b(?:lets? go|in hand|goes on|gone on|going on|puts? off|made again|as ever|likewise|comes? to|hands? on|handed on"
        r"|beside (?:that|it|them)|apart from that|how-manieth|so (?:many|much)|of its own|told|asked for)\b",
        re.I,
    ),
    "a sentence that begins with Of": re.compile(r"(?:^|[.!?]\s+|\n\s*)Of (?!course)"),
    "negation first": re.compile(r"(?:^|[.!?]\s+)(?:None|Nothing|No|Not|Never|Neither|Nobody)\b", re.M),
}


def texts_of(path: Path) -> Iterator[str]:
    """Docstrings and comments of a module, or the text of a page without code and generated parts."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        shown = re.sub(r"<!-- generated: .*?<!-- end -->|^```.*?^```", "", source, flags=re.DOTALL | re.MULTILINE)
        yield "\n".join(line for line in shown.splitlines() if not line.startswith("    "))
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("# ")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def habits_in(text: str) -> Counter[str]:
    return Counter({habit: len(pattern.findall(text)) for habit, pattern in HABITS.items()})


def parts(root: Path = ROOT) -> Mapping[str, list[Path]]:
    """The files of each figure."""
    generated = root / "docs/generated"
    pages = [*root.glob("*.md"), *(path for path in (root / "docs").rglob("*.md") if generated not in path.parents)]
    return {"package": sorted((root / "megatron_lynx").rglob("*.py")), "pages": sorted(pages)}


def counted(paths: list[Path]) -> tuple[dict[Path, Counter[str]], int]:
    """Habits of each file, and the words of all."""
    found = {path: [*texts_of(path)] for path in paths}
    words = sum(len(text.split()) for texts in found.values() for text in texts)
    return {path: sum(map(habits_in, texts), Counter()) for path, texts in found.items()}, words


def figure(paths: list[Path]) -> float:
    """Matches in 1,000 words, rounded up to a tenth."""
    found, words = counted(paths)
    return math.ceil(10_000 * sum(each.total() for each in found.values()) / max(words, 1)) / 10


def lowered(stored: Mapping[str, float], today: Mapping[str, float]) -> dict[str, float]:
    """The figures to store: today's where they are lower, or new."""
    return {name: min(value, stored.get(name, value)) for name, value in today.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", action="store_true", help="lower the stored figures")
    asked = parser.parse_args()
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}
    today = {name: figure(paths) for name, paths in parts().items()}
    for name, paths in parts().items():
        found, words = counted(paths)
        print(f"{name}: {today[name]} per 1,000 words of {words:,}, stored {stored.get(name)}")
        for habit, count in sum(found.values(), Counter()).most_common():
            print(f"  {count:6}  {habit}")
        for path, habits in sorted(found.items(), key=lambda each: -each[1].total())[:8]:
            print(f"  {habits.total():6}  {path.relative_to(ROOT)}")
    if asked.store:
        STORED.write_text(json.dumps(lowered(stored, today), indent=1) + "\n")


if __name__ == "__main__":
    main()
