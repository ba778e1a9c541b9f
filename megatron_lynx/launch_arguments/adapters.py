"""Low-rank adapters of a launch: Megatron-Bridge's `LoRA`, set in its container, or by verl or NeMo-RL, which build it.

ms-swift's adapters are priced as Bridge's, which save as much or, with sequence parallelism, more. They need its backend
mcore-bridge (1.6.5), whose layers replace Megatron's rotary function during their forward. A recomputation would call Megatron's,
so plans are refused."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from megatron_lynx.errors import Problem
from megatron_lynx.kinds.dense.section import LINEARS
from megatron_lynx.launch_arguments.container import Container, plain
from megatron_lynx.launch_arguments.frontend import NEMO, SWIFT, VERL, Frontend
from megatron_lynx.launch_arguments.given import Fact

RANK = "dim"
SECTIONS = {VERL: ("actor_rollout_ref.model.lora", "model.lora"), NEMO: ("policy.megatron_cfg.peft",)}
RENAMED = {VERL: {RANK: "rank", "lora_dtype": "dtype"}, NEMO: {}, SWIFT: {RANK: "lora_rank", "dropout": "lora_dropout"}}
USUAL = {"a2a_experimental": False, "exclude_modules": [], "lora_dtype": None, "sequence_parallel_input_regather": False}
"""Fields that need this value: others communicate, or save, otherwise than is modelled."""
DEFAULTS = {RANK: 32, "dropout": 0.0, "dropout_position": "pre", "target_modules": list(LINEARS)}
SWIFTS = {RANK: 8, "dropout": 0.05}
TUNER, ALL = "tuner_type", "all-linear"


def adapter_facts(launch: Container | Frontend | None, problems: list[Problem], *, planning: bool) -> Iterator[Fact]:
    """Yield the adapters of a launch; nothing without any. `launch`: None for a command of Megatron-LM."""
    if _is_swifts(launch) and planning:
        todo = "estimate prices them; its layers exchange a function while they run, which a recomputation would miss"
        problems.append(Problem(f"--{TUNER}", "lora", "full under a plan", todo))
    if (found := _adapters(launch)) is None:
        return
    fields, words = found
    get = {name: plain(getattr(fields, name, default)) for name, default in {**USUAL, **DEFAULTS}.items()}
    said = {name: f"{words}{RENAMED.get(getattr(launch, 'name', ''), {}).get(name, name)}" for name in get}
    for name, usual in USUAL.items():
        if get[name] not in (usual, None, "None"):
            problems.append(Problem(said[name], str(get[name]), str(usual), "other adapters are not modelled"))
    if get["dropout"] and get["dropout_position"] != "pre":
        problems.append(Problem(said["dropout_position"], str(get["dropout_position"]), "pre, or no dropout"))
    targets = [name for name in LINEARS if name in (get["target_modules"] or ())]
    if not targets or len(targets) < len(get["target_modules"]):
        given = ", ".join(map(str, get["target_modules"] or ())) or "nothing: every linear, the output layer's too"
        todo = "adapters of other linears, and of some layers alone, are not modelled"
        problems.append(Problem(said["target_modules"], given, f"some of {', '.join(LINEARS)}", todo))
    yield Fact("model.adapters.rank", get[RANK], said[RANK])
    yield Fact("model.adapters.targets", targets or list(LINEARS), said["target_modules"])
    yield Fact("model.adapters.dropout", get["dropout"], said["dropout"])
    if _is_swifts(launch):
        yield Fact("model.adapters.whole", True, f"--{TUNER}")


def _is_swifts(launch: Container | Frontend | None) -> bool:
    return isinstance(launch, Frontend) and launch.name == SWIFT and launch.get(TUNER) == "lora"


def _adapters(launch: Container | Frontend | None) -> tuple[Any, str] | None:
    """The fields as Bridge's `LoRA` has them, and the text in front of their names."""
    if isinstance(launch, Container):
        peft = getattr(launch.cfg, "peft", None)
        return None if peft is None else (peft, "cfg.peft.")
    if launch is not None and _is_swifts(launch):
        fields = {name: value for name in DEFAULTS if (value := launch.get(RENAMED[SWIFT].get(name, name))) is not None}
        targets = fields.pop("target_modules", ALL)
        targets = targets if isinstance(targets, list) else str(targets).split()
        if ALL not in targets:
            fields["target_modules"] = targets
        return SimpleNamespace(**{**SWIFTS, **fields}), "--"
    if launch is None or launch.name not in SECTIONS:
        return None
    section = next((one for one in SECTIONS[launch.name] if any(key.startswith(f"{one}.") for key in launch.settings)), None)
    if section is None or not (launch.get(f"{section}.enabled") if launch.name == NEMO else launch.get(f"{section}.rank")):
        return None
    names = {name: f"{section}.{RENAMED[launch.name].get(name, name)}" for name in (*USUAL, *DEFAULTS)}
    given = {name: value for name, key in names.items() if (value := launch.get(key)) is not None}
    return SimpleNamespace(**given), f"{section}."
