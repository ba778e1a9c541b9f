"""Names that the stand-in does not implement: they can be imported, used in annotations and passed around, but not called."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NoReturn


class Unanswered:
    """A function or class of the compiled extension, or of a module that cannot be imported here, which nothing stands in for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{self._name} is not part of the stand-in for Transformer Engine's compiled extension")

    def __getattr__(self, name: str) -> Unanswered:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unanswered(f"{self._name}.{name}")

    def __repr__(self) -> str:
        return f"<unanswered {self._name}>"


class UnansweredModule(ModuleType):
    """A module in which every name is there and none is answered."""

    def __getattr__(self, name: str) -> Unanswered:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unanswered(f"{self.__name__}.{name}")
