"""Launches of ms-swift, verl and NeMo-RL: their options become values under Megatron's names, by the tables of frontends.json.

Lengths, batches, precision and recomputation follow from several options. An option that is in no table is listed as unread."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

from megatron_lynx.errors import ConfigError, Problem, suggestion
from megatron_lynx.launch_arguments.command_line import HEADLINE, CommandLine, Entry, value_of, values_of
from megatron_lynx.launch_arguments.given import SHELL, FlagTable, Given, Value, flag_table
from megatron_lynx.launch_arguments.hf_config import FILE, Shapes, shapes_in
from megatron_lynx.launch_arguments.hf_config import OPTION as SHAPES
from megatron_lynx.launch_arguments.parallel_facts import PACKED
from megatron_lynx.yaml_file import read_yaml

FILES = (".yaml", ".yml")
OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w.@/-]*)(?:=(.*))?", re.DOTALL)
REFERENCE = re.compile(r"\$\{([^${}]+)\}")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*")
SWIFT, VERL, NEMO = "ms-swift", "verl", "NeMo-RL"
SUPERVISED, PACKING = "sft_trainer", ("sequence_packing", "dynamic_batching")
SWITCHES = {
    "policy.megatron_cfg.fp8_cfg.": "policy.megatron_cfg.fp8_cfg.enabled",
    **dict.fromkeys(("recompute_granularity", "recompute_modules"), "policy.megatron_cfg.activation_checkpointing"),
}
DEEPEST = 10


@cache
def _tables() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("frontends.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Frontend:
    name: str
    mode: str
    """The word that starts training: `sft`, `verl.trainer.main_ppo`, `run_grpo.py`."""
    settings: Mapping[str, Any]
    said: frozenset[str]

    @property
    def row(self) -> Mapping[str, Any]:
        return _tables()["frontends"][self.name]  # type: ignore[no-any-return]

    def get(self, key: str) -> Any:
        """A setting, with references to others (`${policy.precision}`) resolved; None without one."""
        value = self.settings.get(key)
        for _ in range(DEEPEST):
            if not isinstance(value, str) or (match := REFERENCE.search(value)) is None:
                return value
            inner = self._referred(match[1])
            if inner is None:
                return value
            value = inner if match[0] == value else value.replace(match[0], str(inner))
        return value

    def _referred(self, text: str) -> Any:
        operation, colon, words = text.partition(":")
        if not colon:
            return self.settings.get(text.strip())
        factors = [int(word) for word in words.split(",") if word.strip().isdecimal()]
        return factors[0] * factors[1] if operation == "mul" and len(factors) == words.count(",") + 1 == 2 else None

    def origin(self, key: str) -> str:
        written = self.row["words"].format(key)
        return written if key in self.said else f"{self.name}'s default of {written}"

    @property
    def model(self) -> str | None:
        return next((str(name) for key in self.row["model"] if (name := self.get(key))), None)

    @property
    def gpus(self) -> int | None:
        nodes, each = (self.get(key) for key in GPUS[self.name])
        return nodes * each if isinstance(nodes, int) and isinstance(each, int) else None

    @property
    def learns(self) -> bool:
        if self.name == SWIFT:
            return self.mode == "rlhf" and self.get("rlhf_type") not in ("dpo", "kto")
        return "sft" not in self.mode

    def place(self, name: str) -> str:
        if name in SIZES:
            return next((key for key in _numbers(self) if SIZES[name] in key), SIZES[name])
        fields = [*(field for field, names in _tables()["fields"].items() if name in names), name]
        keys = (f"{section}{field}" for field in fields for section in self.row["sections"])
        return next((key for key in keys if key in self.settings), self.row["other"].format(fields[0]))

    def say(self, text: str) -> str:
        """A text with the frontend's keys in place of Megatron's flags. Our own flags stay."""
        return FLAG.sub(self._key_of, text)

    def _key_of(self, match: re.Match[str]) -> str:
        flag = flag_table().newest(match[0])
        name = match[0][2:].replace("-", "_") if flag is None else flag.sets
        if flag is None and name != "max_tokens_per_gpu":
            return match[0]
        key = self.row["words"].format(self.place(name))
        off = flag is not None and flag.takes == 0 and flag.switched(match[0]) is False
        return f"{key}{' false' if key.startswith('--') else '=false'}" if off else key

    def setting(self, flag: str) -> str:
        name, *values = shlex.split(flag)
        said = self.say(name)
        if said.endswith((" false", "=false")) or said == name:
            return said
        between = " " if said.startswith("--") else "="
        return f"{said}{between}{shlex.quote(' '.join(values)) if values else 'true'}"

    def in_words(self, problem: Problem) -> Problem:
        return Problem(*map(self.say, (problem.where, problem.finding, problem.needed, problem.todo)))

    def under_plan(self, plan: str, flags: Sequence[str], environment: Mapping[str, str]) -> str:
        how = self.row["plan"]
        sets = [f"{self.row['words'].format(self.place(key))} {value}" for key, value in how["set"].items() if self.get(key)]
        sets = [words if words.startswith("--") else words.replace(" ", "=") for words in sets]
        added = " ".join(filter(None, [how["add"], *sets, *map(self.setting, flags)]))
        variables = [
            how["environment"].format(plan=shlex.quote(plan)),
            *(f"{name}={value}" for name, value in environment.items()),
        ]
        text = f"with {how['module']} (docs/launching.md), add to the launch's environment: {' '.join(variables)}"
        return f"{text}, and to the launch: {added}" if added else text


SIZES = {"seq_length": "length", "micro_batch_size": "micro", "global_batch_size": "batch_size", "max_tokens_per_gpu": "token"}
GPUS = {
    SWIFT: ("NNODES", "NPROC_PER_NODE"),
    VERL: ("trainer.nnodes", "trainer.n_gpus_per_node"),
    NEMO: ("cluster.num_nodes", "cluster.gpus_per_node"),
}


def frontend_of(words: Sequence[str]) -> tuple[Frontend, CommandLine] | None:
    """The launch of a frontend; None if it is none. Raises `ConfigError` for words and files that cannot be read."""
    for name, row in _tables()["frontends"].items():
        entry = re.compile(row["entry"])
        for index, word in enumerate(words):
            pair = f"{words[index - 1] if index else ''} {word}".strip()
            if entry.search(pair) or entry.search(word):
                if name == NEMO and not any(one.startswith(("--config", "policy.", "+policy.", "++policy.")) for one in words):
                    continue
                return _read(name, word, words[:index], words[index + 1 :])
    if "megatron" in words and (mode := words[[*words].index("megatron") + 1 :][:1]):
        todo = suggestion(mode[0], ("pt", "sft", "rlhf"))
        raise ConfigError(HEADLINE, [Problem("launch", f"megatron {mode[0]}", "megatron pt, sft or rlhf", todo)])
    return None


def _read(name: str, mode: str, before: Sequence[str], words: Sequence[str]) -> tuple[Frontend, CommandLine]:
    environment = tuple(
        (key, value) for key, equals, value in (word.partition("=") for word in before) if equals and key.isidentifier()
    )
    problems: list[Problem] = []
    said = _options(words, environment) if name == SWIFT else _overrides(name, words, problems)
    if problems:
        raise ConfigError(HEADLINE, problems)
    defaults = _tables()["frontends"][name]["defaults"]
    frontend = Frontend(name, Path(mode).stem if name == SWIFT else mode, {**defaults, **said}, frozenset(said))
    return frontend, CommandLine(environment, tuple(before), None, tuple(words))


def _options(words: Sequence[str], environment: Sequence[tuple[str, str]]) -> dict[str, Any]:
    said: dict[str, Any] = {}
    rest = list(words)
    if rest and rest[0].endswith(FILES):
        said |= read_yaml(Path(rest.pop(0)))
    variables = {**(said.pop("ENV", None) or {}), **dict(environment)}
    said |= {"NNODES": 1} | {key: value_of(str(variables[key])) for key in GPUS[SWIFT] if key in variables}
    name = ""
    values: dict[str, list[str]] = {}
    for word in rest:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            values[name] = [value] if equals else []
        else:
            values.setdefault(name, []).append(word)
    for name, given in values.items():
        read = [value_of(word) for word in given]
        said[name] = True if not read else read[0] if len(read) == 1 else read
    return said


def _overrides(name: str, words: Sequence[str], problems: list[Problem]) -> dict[str, Any]:
    rest, said = list(words), dict[str, Any]()
    while rest:
        word = rest.pop(0)
        option, equals, value = word.partition("=")
        if option in ("--config", "--config-name", "--config-path", "--config-dir"):
            value = value if equals else rest.pop(0) if rest else ""
            said = _inherited(Path(value), problems) | said if option == "--config" else said
        elif (match := OVERRIDE.fullmatch(word)) is not None and (match[3] is not None or match[1] == "~"):
            _merge(said, {match[2]: None if match[1] == "~" else value_of(match[3])})
        else:
            todo = "let the shell fill its variables in" if SHELL.search(word) else ""
            problems.append(Problem("launch", f"the word {word!r}", "key=value, as hydra reads it", todo))
    if name == NEMO and not any(word.startswith("--config") for word in words):
        problems.append(Problem("--config", "nothing", "NeMo-RL's YAML file: its defaults are in it", "add --config FILE"))
    return said


def _inherited(path: Path, problems: list[Problem], depth: int = 0) -> dict[str, Any]:
    data = dict(read_yaml(path))
    parents = data.pop("defaults", None) or []
    said: dict[str, Any] = {}
    if depth == DEEPEST:
        problems.append(Problem(f"{path}: defaults", "files that inherit from each other", f"at most {DEEPEST} levels"))
        return said
    for parent in [parents] if isinstance(parents, str) else parents:
        _merge(said, _inherited(path.parent / str(parent), problems, depth + 1))
    _merge(said, _flat(data))
    return said


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return flat


def _merge(said: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Lay settings over others. A value in place of a section removes the section's keys."""
    for key, value in more.items():
        for inner in [inner for inner in said if inner.startswith(f"{key}.")]:
            del said[inner]
        said[key] = value


def given_frontend(
    frontend: Frontend, shapes: Path | None, gpus: int | None, table: FlagTable
) -> tuple[Given, list[Problem], dict[str, tuple[str, ...]]]:
    """The launch's values by Megatron's names, its problems, and the options that do not matter, by subject."""
    problems = list(_refused(frontend))
    model = _shapes(frontend, shapes, problems)
    release, row = table.releases[-1], frontend.row
    entries = [
        *(model.entries if model else ()),
        *((f"{frontend.name}'s own {name}", name, value) for name, value in row["sets"].items()),
    ]
    unread: list[str] = []
    without_matter: list[str] = []
    read = {*row["model"], "rlhf_type", *GPUS[frontend.name], *row["allowed"], *_numbers(frontend)}
    for key in frontend.settings:
        if named := _names(frontend, key, table):
            entries += [(frontend.origin(key), name, frontend.get(key)) for name in named]
        elif key in frontend.said and key not in read:
            fields = table.no_flag | table.no_flag_of_bridge
            known = key.rpartition(".")[2] in fields or any(fnmatchcase(key, one) for one in row["without_matter"])
            (without_matter if known else unread).append(row["words"].format(key))
    values = values_of([entry for entry in entries if entry[2] != "none"], table, release, problems)
    missing = () if model else ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
    if misread := list(_misread(frontend)):
        problems += misread
        missing = (*missing, "seq_length", "micro_batch_size")
    else:
        batch = {SWIFT: _of_swift, VERL: _of_verl, NEMO: _of_nemo}[frontend.name]
        values |= values_of(batch(frontend, values, gpus), table, release, problems)
    values |= {name: Value(table.of_name[name][-1], "", None) for name in missing}  # reported above
    unread += [] if model is None else [f"{FILE}: {key}" for key in model.unread]
    subjects = {f"{frontend.name}'s own, which have no effect on activations": tuple(without_matter)} if without_matter else {}
    synchronised = frontend.get("padding_free") and not frontend.get("apply_rope_fusion")
    packed = f"{frontend.origin('padding_free')}, and no apply_rope_fusion" if synchronised else ""
    return Given(values, (release,), table, tuple(unread), packed), problems, subjects


def _refused(frontend: Frontend) -> Iterator[Problem]:
    for key, (allowed, why) in frontend.row["allowed"].items():
        if (value := frontend.get(key)) not in (None, [], "", *allowed):
            needed = " or ".join(str(one).lower() if isinstance(one, bool) else str(one) for one in allowed) or "nothing"
            yield Problem(frontend.origin(key), str(value), needed, why)


def _shapes(frontend: Frontend, path: Path | None, problems: list[Problem]) -> Shapes | None:
    folder = Path(frontend.model or "").expanduser()
    path = folder if path is None and frontend.model and (folder / FILE).is_file() else path
    if path is None:
        needed = f"the {FILE} of {frontend.model or 'the model'}: no hub is asked here"
        problems.append(Problem(SHAPES, "nothing", needed, f"{SHAPES} PATH, a file or its folder"))
        return None
    return shapes_in(path)


def _names(frontend: Frontend, key: str, table: FlagTable) -> list[str]:
    section = next((section for section in frontend.row["sections"] if key.startswith(section)), None)
    if section is None:
        return []
    field = key.removeprefix(section)
    names = _tables()["fields"].get(field, [field])
    switch = SWITCHES.get(section) or (SWITCHES.get(field) if frontend.name == NEMO else None)
    if switch and not frontend.get(switch):
        return []
    return [name for name in names if name in table.of_name]


def _numbers(launch: Frontend) -> tuple[str, ...]:
    actor, policy = "actor_rollout_ref.actor.", "policy."
    if launch.name == SWIFT:
        return ("packing_length" if launch.get("packing_length") else "max_length", "global_batch_size", "micro_batch_size")
    if launch.name == VERL and launch.mode.endswith(SUPERVISED):
        size = "max_token_len_per_gpu" if launch.get("data.use_dynamic_bsz") else "micro_batch_size_per_gpu"
        return ("data.max_length", "data.train_batch_size", f"data.{size}")
    if launch.name == VERL:
        size = "ppo_max_token_len_per_gpu" if launch.get(f"{actor}use_dynamic_bsz") else "ppo_micro_batch_size_per_gpu"
        lengths, batches = (
            ("max_prompt_length", "max_response_length"),
            (f"{actor}ppo_mini_batch_size", "actor_rollout_ref.rollout.n"),
        )
        return (*(f"data.{length}" for length in lengths), *batches, f"{actor}{size}")
    packs = next((way for way in PACKING if launch.get(f"{policy}{way}.enabled")), None)
    size = "train_micro_batch_size" if packs is None else f"{packs}.train_mb_tokens"
    return tuple(f"{policy}{key}" for key in ("max_total_sequence_length", "train_global_batch_size", size))


def _misread(launch: Frontend) -> Iterator[Problem]:
    for key in _numbers(launch):
        value = launch.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            written = launch.row["words"].format(key)
            yield Problem(written, "nothing" if value is None else str(value), "a whole number, at least 1")


def _of_swift(launch: Frontend, values: Mapping[str, Value], gpus: int | None) -> list[Entry]:
    said, get = launch.origin, launch.get
    key, batch, micro = _numbers(launch)
    kind = get("rlhf_type") or ("dpo" if launch.mode == "rlhf" else "")
    answers = get("max_completion_length")
    length = get(key) + ((answers if isinstance(answers, int) else 512) if kind in ("grpo", "gkd") else 0)
    entries: list[Entry] = [(said(key), "seq_length", length), *_pairs(launch, (batch, micro), kind == "dpo")]
    off = {
        "bf16": ("fp16", get("fp16")),
        "sequence_parallel": ("tensor_model_parallel_size", get("tensor_model_parallel_size") == 1),
        "accumulate_allreduce_grads_in_fp32": ("main_grads_dtype", get("main_grads_dtype") == "bf16"),
    }
    return [*entries, *((said(cause), name, False) for name, (cause, holds) in off.items() if holds)]


def _pairs(launch: Frontend, keys: Sequence[str], in_pairs: bool) -> Iterator[Entry]:
    why, times = (": a chosen and a rejected answer each", 2) if in_pairs else ("", 1)
    for key, name in zip(keys, ("global_batch_size", "micro_batch_size"), strict=True):
        yield f"{launch.origin(key)}{why}", name, times * launch.get(key)


def _packed(launch: Frontend, key: str, samples: int, longest: int, values: Mapping[str, Value], gpus: int | None) -> list[Entry]:
    said, tokens = launch.origin(key), launch.get(key)
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    tensor, pipeline, context = (values[name].value or 1 if name in values else 1 for name in names)
    replicas = max(1, gpus // (tensor * pipeline * context)) if gpus else 1
    count = ceil(samples * longest / (tokens * context) / replicas) * replicas
    text = f"{said}: {launch.name} packs {PACKED}"
    batches = (f"{said}: {samples} sequences of at most {longest} tokens", "global_batch_size", count)
    return [(text, "seq_length", tokens * context), (text, "micro_batch_size", 1), batches]


def _of_verl(launch: Frontend, values: Mapping[str, Value], gpus: int | None) -> list[Entry]:
    said, get, keys = launch.origin, launch.get, _numbers(launch)
    supervised, actor = len(keys) == 3, "actor_rollout_ref.actor."
    numbers = [get(key) for key in keys]
    longest, samples = numbers[:2] if supervised else (numbers[0] + numbers[1], numbers[2] * numbers[3])
    precision, in_fp32 = (
        next(key for key in (f"engine.{name}", f"{actor}megatron.{name}") if key in launch.settings)
        for name in ("dtype", "override_ddp_config.grad_reduce_in_fp32")
    )
    entries: list[Entry] = [(said(precision), "bf16" if get(precision) == "bfloat16" else "fp16", True)]
    entries += [(said(in_fp32), "accumulate_allreduce_grads_in_fp32" if get(in_fp32) else "grad_reduce_in_bf16", True)]
    if "token" in keys[-1]:
        return [*entries, *_packed(launch, keys[-1], samples, longest, values, gpus)]
    lengths, batches = (keys[:1], keys[1:2]) if supervised else (keys[:2], keys[2:4])
    sizes = {"seq_length": longest, "global_batch_size": samples, "micro_batch_size": numbers[-1]}
    texts = (" and ".join(lengths), " x ".join(batches), said(keys[-1]))
    return [*entries, *((text, name, value) for text, (name, value) in zip(texts, sizes.items(), strict=True))]


def _of_nemo(launch: Frontend, values: Mapping[str, Value], gpus: int | None) -> list[Entry]:
    said, get = launch.origin, launch.get
    longest, batch, size = _numbers(launch)
    precision, recomputes = "policy.precision", "policy.megatron_cfg.activation_checkpointing"
    names = {"bfloat16": "bf16", "float16": "fp16"}
    entries: list[Entry] = [(said(precision), names[get(precision)], True)] if get(precision) in names else []
    if not get(in_fp32 := "policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32"):
        entries += [(said(in_fp32), "grad_reduce_in_bf16", True)]
    if get(recomputes) and get("policy.megatron_cfg.recompute_granularity") in (None, "full"):
        whole: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        entries += [(said(recomputes), name, value) for name, value in whole.items()]
    in_pairs = launch.mode.rpartition("/")[2].startswith("run_dpo")
    if "sequence_packing" in size:
        return [*entries, *_packed(launch, size, get(batch) * (1 + in_pairs), get(longest), values, gpus)]
    entries += [(said(longest), "seq_length", get(longest)), *_pairs(launch, (batch, size), in_pairs)]
    if "tokens" in size:
        entries += [(said(size), "micro_batch_size", max(1, get(size) // get(longest)))]
    return entries
