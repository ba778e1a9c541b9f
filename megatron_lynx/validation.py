"""Validates user data; reports all errors at once.

Pydantic checks a whole (`Part._problems`) only if its fields are valid. So misspelt names are corrected in a copy, which is
checked again: a misspelt site does not hide a missing stage. The copy is never returned, as there are problems to raise.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import reduce
from inspect import isclass
from operator import getitem
from typing import Any, Self, TypeVar, get_args

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from megatron_lynx.errors import ConfigError, Problem, closest, suggestion

ModelT = TypeVar("ModelT", bound=BaseModel)
Path = tuple[str | int, ...]

NEEDED = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "model_type": "a mapping",
    "dict_type": "a mapping",
    "tuple_type": "a list",
    "list_type": "a list",
    "none_required": "nothing",
    "finite_number": "a finite number",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:g}",
}
"""Pydantic's error types in words."""

WRONG_TYPE = ("_type", "none_required", "literal_error")
"""Ends of error types that may be about another arm of a union."""


class Part(BaseModel):
    """Base of parts of files: immutable, without unknown keys, without numbers that are not finite."""

    __slots__ = ("_known_hash",)
    """Copies and pickles do not take it: a copy may have other values, another process other hashes."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __hash__(self) -> int:
        value: int | None = getattr(self, "_known_hash", None)
        if value is None:
            value = hash((type(self), *(self.__dict__[name] for name in type(self).model_fields)))
            object.__setattr__(self, "_known_hash", value)
        return value

    def _problems(self) -> Iterable[str]:
        """Conflicts between fields that are valid by themselves."""
        return ()

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if problems := list(self._problems()):
            raise ValueError("; ".join(problems))
        return self


def digest_of(part: BaseModel, exclude: Mapping[str, Any]) -> str:
    """SHA-256 of a part as JSON, without `exclude` (pydantic's). Keys with their defaults are left out, so that digests stay when
    a new key is added."""
    return hashlib.sha256(part.model_dump_json(by_alias=True, exclude_defaults=True, exclude=dict(exclude)).encode()).hexdigest()


def formerly(name: str, older: str) -> Any:
    """Annotation of a field that older files have under another name. Digests use that one, so that they stay."""
    return Field(validation_alias=AliasChoices(name, older), serialization_alias=older)


def validated(model_class: type[ModelT], data: Mapping[str, Any], where: str | os.PathLike[str]) -> ModelT:
    """`data` as an instance of `model_class`; `where` (a file) starts every problem's place: `plan.yaml: stages.0.layers`.

    Strict: text is no number, a number is no text, and only true and false are booleans. Raises `ConfigError` with all problems.
    """
    text, where = json.dumps(data), os.fspath(where)
    if other := _of_another_kind(model_class, data):
        raise ConfigError(f"{where} is not a {_in_words(model_class)}", [Problem(where, *other)])
    problems: dict[Problem, None] = {}  # in order, each once
    while True:
        try:
            instance = model_class.model_validate_json(text, strict=True)
        except ValidationError as error:
            content = json.loads(text)
            problems |= dict.fromkeys(_problems_of(error, model_class, content, where))
            if _repaired(content, error, model_class):
                text = json.dumps(content)
                continue
        if problems:
            raise ConfigError(f"{where} is not a valid {_in_words(model_class)}", list(problems))
        return instance


def _repaired(data: Any, error: ValidationError, model_class: type[BaseModel]) -> bool:
    """Replace misspelt names in a copy of the data, and drop keys that are like none. Returns whether anything changed."""
    changed = False
    for detail in error.errors(include_url=False):
        if detail["type"] not in ("extra_forbidden", "literal_error") or not (path := _path_in(data, detail["loc"])):
            continue
        *above, name = path
        parent = reduce(getitem, above, data)
        if detail["type"] == "literal_error":
            if (meant := closest(str(detail["input"]), _literals(detail))) is not None:
                parent[name], changed = meant, True
        elif name in parent:
            value, meant, changed = parent.pop(name), closest(str(name), _keys_at(model_class, tuple(above))), True
            if meant is not None:
                parent.setdefault(meant, value)
    return changed


def _literals(detail: ErrorDetails) -> list[str]:
    return re.findall(r"'([^']*)'", detail["ctx"]["expected"])


def _of_another_kind(model_class: type[BaseModel], data: Mapping[str, Any]) -> tuple[str, str] | None:
    """Finding and need of a file with many keys, none of which `model_class` requires, such as a cluster in place of a plan."""
    fields = dict(_fields_of(model_class))
    required = [name for name, field in fields.items() if field.is_required()]
    unknown = [name for name in data if name not in fields]
    if not required or len(unknown) < 3 or any(name in data for name in required):
        return None
    return f"the keys {', '.join(map(str, data))}", f"those of a {_in_words(model_class)}: {', '.join(required)}"


def _in_words(model_class: type[BaseModel]) -> str:
    return re.sub(r"\B(?=[A-Z])", " ", model_class.__name__).lower()


def _problems_of(error: ValidationError, model_class: type[BaseModel], data: Any, where: str) -> list[Problem]:
    """The problems, joined by place, without those of union arms that were not meant."""
    at: dict[Path, list[tuple[str, Problem]]] = {}
    for detail in error.errors(include_url=False):
        for path, problem in _found(detail, model_class, data, where):
            at.setdefault(path, []).append((detail["type"], problem))
    above = {path[:length] for path in at for length in range(len(path))}
    problems: dict[Problem, None] = {}  # in order, each once
    for path, found in at.items():
        sharper = [problem for kind, problem in found if not kind.endswith(WRONG_TYPE)]  # otherwise a name that no arm has
        if sharper:
            problems |= dict.fromkeys(sharper)
        elif path not in above:
            needed = " or ".join(dict.fromkeys(problem.needed for _, problem in found))
            named = next((problem for kind, problem in found if kind == "literal_error"), found[0][1])
            problems[replace(named, needed=needed)] = None
    return list(problems)


def _found(detail: ErrorDetails, model_class: type[BaseModel], data: Any, where: str) -> Iterator[tuple[Path, Problem]]:
    """The problems of one error, each with its path in the data."""
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    path = _path_in(data, detail["loc"])
    if kind == "missing":
        path = *path, detail["loc"][-1]
    place = f"{where}: {'.'.join(map(str, path))}" if path else where
    if kind == "missing":
        yield path, Problem(place, "nothing", "this key")
    elif kind == "extra_forbidden":
        known = _keys_at(model_class, path[:-1])
        yield path, Problem(place, "an unknown key", _one_of(known), suggestion(str(path[-1]), known))
    elif kind == "literal_error":
        known = _literals(detail)
        needed = _one_of(known) if known else str(context["expected"])
        yield path, Problem(place, _shown(value), needed, suggestion(str(value), known))
    elif kind == "value_error":
        for sentence in str(context["error"]).split("; "):  # validators join problems with "; "
            yield path, Problem(place, sentence, "")
    else:
        needed = NEEDED.get(kind, detail["msg"].removeprefix("Input should be ")).format_map(context)
        number_for_text = kind == "string_type" and isinstance(value, (int, float))
        yield path, Problem(place, _shown(value), needed, "put it in quotes" if number_for_text else "")


def _path_in(data: Any, location: tuple[str | int, ...]) -> Path:
    """Pydantic's location without the names of union arms."""
    path: list[str | int] = []
    for part in location:
        if part in data if isinstance(data, dict) else isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
            path.append(part)
    return tuple(path)


def _keys_at(model_class: type[BaseModel], path: Path) -> list[str]:
    models = [model_class]
    for part in path:
        inner = [field.annotation for model in models for key, field in _fields_of(model) if key == part]
        models = [model for annotation in inner for model in _models_in(annotation)] or models
    return [key for model in models for key, _ in _fields_of(model)]


def _fields_of(model: type[BaseModel]) -> list[tuple[str, FieldInfo]]:
    return [(field.alias or name, field) for name, field in model.model_fields.items()]


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _one_of(names: Iterable[str]) -> str:
    return "one of " + ", ".join(names)


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return ("an empty " if not value else "a ") + ("mapping" if isinstance(value, dict) else "list")
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
