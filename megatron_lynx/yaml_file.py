"""Reads YAML files strictly, and writes them.

PyYAML reads YAML 1.1. This reads the core of YAML 1.2, without its surprising parts:

    written          PyYAML gives        read here
    yes, on, off     a boolean           text; only true and false are booleans
    1e9              text                1000000000
    010              8                   refused: write 10, or '010' for text
    0.10: (a key)    0.1                 text: keys are never numbers
    a key twice      the last one        refused, with both lines
    &name, *name     a shared object     refused
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import yaml

from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.whole_file import text_in

MOST_VALUES = 100_000
"""Most keys and values of a file, which takes some seconds to read. Plans of the largest models have 4,000."""

LINE_WIDTH = 120

_OCTAL = "tag:lynx,2026:octal"
_SCALARS = (
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE"),
    ("tag:yaml.org,2002:null", r"null|Null|NULL|~|"),
    (_OCTAL, r"[-+]?0[0-9]+"),
    ("tag:yaml.org,2002:int", r"[-+]?(0|[1-9][0-9]*)"),
    ("tag:yaml.org,2002:float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"),
)
"""The type of a plain scalar: that of the first pattern that matches, else text."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012  PyYAML's own attribute, replaced so that none of 1.1's remain

    def __init__(self, text: str, where: str) -> None:
        super().__init__(text)
        self.where = where
        self.problems: dict[int, list[Problem]] = {}
        self.values = 0
        if yaml.__with_libyaml__:  # its parser is five times faster than PyYAML's own
            parser = yaml.CSafeLoader(text)
            vars(self).update({name: getattr(parser, name) for name in ("peek_event", "check_event", "get_event")})

    def add_problem(self, node: yaml.Node, content: str, needed: str, todo: str) -> None:
        line = node.start_mark.line + 1
        self.problems.setdefault(line, []).append(Problem(f"{self.where}:{line}", content, needed, todo))

    def found_problems(self) -> list[Problem]:
        return [problem for line in sorted(self.problems) for problem in self.problems[line]]

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.values += 1
        if self.values > MOST_VALUES:
            raise ValueError(f"found more than {MOST_VALUES} keys and values, needed fewer: jobs, plans and profiles are small")
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "anchor", None) is not None:
            refusal = f"nothing can be shared by name here ({event.anchor}), write it out where it is meant"
            raise yaml.composer.ComposerError(None, None, refusal, event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first_line: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key that is a list or a mapping", key.start_mark)
            key.tag = "tag:yaml.org,2002:str"  # `0.10` and `yes` are names if they are keys
            line = key.start_mark.line + 1
            if key.value in first_line:
                repetition = f"{key.value!r} a second time (first on line {first_line[key.value]})"
                self.add_problem(key, repetition, "each key once", "remove one of them")
            first_line.setdefault(key.value, line)
        return super().construct_mapping(node, deep)

    def construct_members(self, node: yaml.MappingNode) -> list[Any]:
        return list(self.construct_mapping(node))

    def construct_decimal(self, node: yaml.ScalarNode) -> int | float:
        value = float(node.value)
        counts = "." not in node.value and abs(value) < 2**53 and value.is_integer()  # 1e9 is a count, 1e-3 is not
        return int(value) if counts else value

    def refuse_octal(self, node: yaml.ScalarNode) -> str:
        number = f"{node.value} (octal to some, decimal to others)"
        todo = f"write {node.value.lstrip('+-0') or '0'} for the number, or quote it for text"
        self.add_problem(node, number, "no leading zero", todo)
        return str(node.value)


for _tag, _pattern in _SCALARS:
    _Loader.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), None)
_Loader.yaml_constructors = {}  # a plan has plain data only: no dates, sets or binary
for _kind in ("null", "bool", "str", "seq", "map"):
    _tag = f"tag:yaml.org,2002:{_kind}"
    _Loader.add_constructor(_tag, yaml.SafeLoader.yaml_constructors[_tag])
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_decimal)
_Loader.add_constructor("tag:yaml.org,2002:set", _Loader.construct_members)
_Loader.add_constructor(_OCTAL, _Loader.refuse_octal)
_Loader.add_constructor(None, yaml.SafeLoader.construct_undefined)  # type: ignore[type-var]


def read_yaml(path: str | os.PathLike[str], needed: str = "") -> dict[str, Any]:
    """The mapping in a YAML file, keys as text. `needed`: the kind of file, for errors.

    Raises `ConfigError` with every problem and its line: a file that cannot be read, is empty, ends early or has something else
    than one mapping, a key given twice, a number with a leading zero.
    """
    text, where = text_in(path, needed or "a readable YAML file"), os.fspath(path)
    try:
        loader = _Loader(text, where)
        data, problems = loader.get_single_data(), loader.found_problems()
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        data, problems = None, [_syntax_problem(where, error)]
    if not problems and not isinstance(data, dict):
        content = "an empty file" if data is None else f"a {'list' if isinstance(data, list) else 'single value'} at the top"
        problems = [Problem(where, content, needed or "a mapping (lines of `key: value`)")]
    if problems:
        raise ConfigError(f"{where} cannot be used", problems)
    return data  # type: ignore[no-any-return]


def _syntax_problem(where: str, error: Exception) -> Problem:
    if isinstance(error, RecursionError):
        return Problem(where, "brackets nested too deeply", "")
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return Problem(where, " ".join(str(error).split()), "")
    sentence = (error.problem or "not valid YAML").replace("'<stream end>'", "the end of the file")
    if error.context and error.context_mark is not None:
        sentence += f" ({error.context} that begins on line {error.context_mark.line + 1})"
    return Problem(f"{where}:{error.problem_mark.line + 1}", sentence, "")


class FlowMapping(dict[str, Any]):
    """A mapping to be written on one line: `{tensor: 2, pipeline: 1}`."""


class FlowSequence(list[Any]):
    """A list to be written on one line: `[linear_proj, linear_fc2]`."""


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or this module's reader would read as another type."""

    yaml_implicit_resolvers = {key: list(value) for key, value in yaml.SafeDumper.yaml_implicit_resolvers.items()}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Quotes Unicode's own line breaks, at which PyYAML would fold text and read it back changed."""
        style = '"' if any(mark in text for mark in "\x85\u2028\u2029") else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)  # items of a list are indented under its key


for _tag, _pattern in _SCALARS:
    _Dumper.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), None)
_Dumper.add_representer(str, _Dumper.represent_text)
_Dumper.add_representer(FlowMapping, lambda dumper, data: dumper.represent_mapping("tag:yaml.org,2002:map", data.items(), True))
_Dumper.add_representer(FlowSequence, lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data, True))


def write_yaml(data: Mapping[str, Any]) -> str:
    """YAML text of plain data, keys in the order given. `read_yaml` gives back an equal mapping."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=LINE_WIDTH, default_flow_style=False)
