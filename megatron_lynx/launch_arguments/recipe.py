"""A recipe of Megatron-Bridge: a function that returns a container, called where neither a GPU nor a network need be.

--bridge recipes:llama     `llama()` of `recipes.py` in the folder that the command was given in, or of an installed module

What it prints goes to standard error. What goes wrong in it is told by what is missing: a package, or a hub that was not asked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from typing import Any

from megatron_lynx.errors import ConfigError, Problem

OPTION = "--bridge"
OFFLINE = "HF_HUB_OFFLINE"
HEADLINE = "the configuration cannot be read"


def container_of(name: str) -> Any:
    """What the function returns that `name` says. Raises `ConfigError`."""
    where, (module, _, function) = f"{OPTION} {name}", name.partition(":")
    if not module or not function:
        needed = "module:function, which returns a ConfigContainer, or a file (.yaml) of one"
        raise ConfigError(HEADLINE, [Problem(where, name or "nothing", needed)])
    with _beside_the_user():
        try:
            return getattr(import_module(module), function)()
        except (Exception, SystemExit) as error:  # noqa: BLE001  the user's code, and a hub's
            raise ConfigError(HEADLINE, [_failed(where, module, error)]) from None


def _failed(where: str, module: str, error: BaseException) -> Problem:
    text = " ".join(str(error).split()) or "no reason"
    found = f"{type(error).__name__}: {text if len(text) < 200 else f'{text[:197]}...'}"
    written = f"write the container to a file where it can be had, cfg.to_yaml('cfg.yaml'), and give that: {OPTION} cfg.yaml"
    needed = "what can be imported here, with Megatron-Bridge and all that it needs"
    missing = next((one.name for one in _chain(error, stated=True) if isinstance(one, ModuleNotFoundError)), None)
    if missing is not None and not f"{module}.".startswith(f"{missing}."):
        package = missing.partition(".")[0]
        return Problem(where, f"no package {package} (import {missing})", needed, f"install {package}, or {written}")
    if isinstance(error, ImportError):
        return Problem(where, found, needed, f"or {written}")
    if _asked_a_hub(error):
        needed = "a recipe that needs no network: this one asks a hub for a model's configuration"
        return Problem(where, found, needed, f"let it ask ({OFFLINE}=0), or {written}")
    return Problem(where, found, "a function without arguments that returns a ConfigContainer")


def _asked_a_hub(error: BaseException) -> bool:
    hubs = ("huggingface_hub", "requests", "httpx", "urllib3", "urllib")
    return any(type(one).__module__.split(".")[0] in hubs or "huggingface.co" in str(one) for one in _chain(error))


def _chain(error: BaseException, *, stated: bool = False) -> list[BaseException]:
    """An error and those behind it: libraries wrap what went wrong. `stated`: only what is said to be a cause."""
    chain: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in chain:
        chain.append(one)
        one = one.__cause__ or (None if stated else one.__context__)
    return chain


@contextmanager
def _beside_the_user() -> Iterator[None]:
    """Modules of the folder that the command was given in can be imported, as by `python -m`. Hubs are not asked, which would try
    for minutes where there is no network, unless the user says so."""
    folder, said = os.getcwd(), os.environ.get(OFFLINE)
    sys.path.insert(0, folder)
    os.environ.setdefault(OFFLINE, "1")
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.path.remove(folder)
        if said is None:
            del os.environ[OFFLINE]
