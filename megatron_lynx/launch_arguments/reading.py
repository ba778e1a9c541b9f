"""Reads a launch: the job, the flag of each value, and the problems.

words ─> arguments, container or frontend ─> values by Megatron's names ─ kinds ─┬─ read ──────> facts ─> a job's data
                                                                                 ├─ priced as ─> reported
                                                                                 ├─ refused ───> problems
                                                                                 └─ no matter ─> listed"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

from megatron_lynx.config import Job
from megatron_lynx.config.experts import MARGIN
from megatron_lynx.config.job import Policy
from megatron_lynx.config.loader import load_cluster
from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.kinds.dense.section import LINEARS
from megatron_lynx.launch.script import flags_in
from megatron_lynx.launch_arguments.command_line import HEADLINE, LAUNCHER, CommandLine, command_line, without_option
from megatron_lynx.launch_arguments.container import OPTION as BRIDGE
from megatron_lynx.launch_arguments.container import Container, given_container, plain, read_container
from megatron_lynx.launch_arguments.expert_facts import DISPATCHER, expert_facts, has_experts, without_experts
from megatron_lynx.launch_arguments.frontend import NEMO, SWIFT, VERL, Frontend, frontend_of, given_frontend
from megatron_lynx.launch_arguments.given import Fact, FlagKind, Given, Value, as_job_data, flag_table, given_arguments
from megatron_lynx.launch_arguments.hf_config import OPTION as SHAPES
from megatron_lynx.launch_arguments.hf_config import shapes_in, with_shapes
from megatron_lynx.launch_arguments.layers import PATTERN_FLAG, TYPE, as_gpt, opaque_facts, predicting_of, stack_of, window_facts
from megatron_lynx.launch_arguments.model_facts import FORKS, NEWER, SLIME, log_probability_facts, model_facts, optimizer_facts
from megatron_lynx.launch_arguments.parallel_facts import USERBUFFERS, gpus_of_actor, is_of_slime, parallel_facts, with_packing
from megatron_lynx.launch_arguments.today import FINE_GRAINED, Today, against_megatron, graph_facts, today_of
from megatron_lynx.limits import ARGUMENTS, CIRCUMSTANCES, OR_ELSE, limits
from megatron_lynx.stock.setting import FULL, NONE, SELECTIVE, StockSetting
from megatron_lynx.tables import WrappedTable
from megatron_lynx.units import format_bytes
from megatron_lynx.validation import validated

EXPERTS_OWN = ("moe_", "expert_")
SOME_USERBUFFERS = "userbuffers of all linears: the range of the step, from what stock hides to everything, holds fewer, too"
DISPATCH = "exchanges in which a token travels once to each rank of its experts"
SCHEDULE = "--lynx-schedule"
POLICIES: dict[StockSetting, Policy] = {NONE: "none", SELECTIVE: "selective", FULL: "full"}


@dataclass(frozen=True)
class Reading:
    command: CommandLine
    given: Given
    facts: tuple[Fact, ...]
    priced_as: tuple[tuple[str, str], ...]
    no_matter: dict[str, tuple[str, ...]]
    problems: tuple[Problem, ...]
    today: Today
    container: Container | Frontend | None = None
    """Megatron-Bridge's, or a frontend's launch, if one was read; then there are no flags of Megatron."""

    def spoken(self, problem: Problem) -> Problem:
        return problem if self.container is None else self.container.in_words(problem)

    def said(self, flags: Sequence[str]) -> str:
        return " ".join(flags if self.container is None else map(self.container.setting, flags))

    @property
    def learns(self) -> bool:
        """Whether its loss is one on logits that is not priced (`log_probability_facts`)."""
        priced = any(fact.place.startswith("model.log_probabilities") for fact in self.facts)
        return not priced and isinstance(self.container, Frontend) and self.container.learns

    @property
    def job_data(self) -> dict[str, Any]:
        """The facts as a job file has them, without a cluster; incomplete if there are problems."""
        return as_job_data(self.facts)

    @property
    def is_chunked(self) -> bool:
        parallel = self.job_data.get("parallel", {})
        partition = parallel.get("partition")
        return "layers_per_chunk" in parallel or (isinstance(partition, list) and len(partition) > parallel["pipeline"])

    def with_graphs_of(self, captured: Collection[str]) -> Reading:
        return replace(self, today=self.today.beside_graphs) if captured else self

    def changed(self, setting: Mapping[str, Sequence[str]], without: Collection[str] = ()) -> CommandLine:
        names = {*self.today.replaced, *without}
        if self.given["step_batch_size_schedule"] is not None:
            names.add("global_batch_size")  # Megatron refuses the two together
        return replace(self.command, arguments=self.given.with_flags(self.command.arguments, setting, names))

    def under_plan(
        self,
        plan: str,
        flags: Sequence[str],
        environment: Mapping[str, str] = MappingProxyType({}),
        without: Collection[str] = (),
        runner: Sequence[str] = LAUNCHER,
    ) -> str:
        if self.container is None:
            text = self.changed({}, without).under_plan(plan, flags, environment, runner)
        else:
            text = self.container.under_plan(plan, flags, environment)
        names = [name for name in without if name in self.given.values]
        dropped = list(dict.fromkeys([*self.today.flags, *map(self.given.origin, names)]))
        dropped = [said for said in dropped if f" {said}=" not in text and f" {said} " not in text]  # set to another value
        return f"{text}, and drop {' '.join(dropped)}" if self.command.script is None and dropped else text


def read_launch(words: Sequence[str], *, gpus: int | None = None, planning: bool = True, strict: bool = False) -> Reading:
    """`gpus` replaces the launcher's number. `planning`: for a plan, not for an estimate of the launch's recomputation. `strict`:
    unknown flags are problems. Raises `ConfigError` only if there is no launch; other errors are in `problems`.
    """
    words, shapes = without_option(words, SHAPES)
    table, own = flag_table(), dict[str, tuple[str, ...]]()
    container: Container | Frontend | None = None
    if (frontend := frontend_of(words)) is not None:
        container, command = frontend
        path = None if shapes is None else Path(shapes)
        given, problems, own = given_frontend(container, path, gpus or command.gpus or container.gpus, table)
    elif (command := command_line(words)).arguments[:1] == (BRIDGE,):
        container = read_container(command.arguments[1:], gpus)
        given, problems = given_container(container, table)
    else:
        given, problems = given_arguments(command.arguments, table)
        if shapes is not None:
            given = with_shapes(given, shapes_in(Path(shapes)), problems)
    of_launch = container.gpus if isinstance(container, Frontend) else gpus_of_actor(given)
    counts = {"--gpus": gpus, "the launcher": command.gpus, "the launch": of_launch}
    counted_by, gpus = next(((origin, count) for origin, count in counts.items() if count is not None), ("", None))
    loss = [*log_probability_facts(given, container, of_slime=is_of_slime(given))]
    adapters = [*adapter_facts(container, problems, planning=planning)]
    read = {option for fact in (*loss, *adapters) for option in fact.origin.split(", ")}
    own = {subject: tuple(key for key in keys if key not in read) for subject, keys in own.items()}
    given = as_gpt(with_packing(given), problems)
    problems += given.conflicts()
    given = replace(given, unknown=tuple(words for words in given.unknown if words.split()[0] not in SLIME))
    facts = [*model_facts(given, problems), *loss, *window_facts(given, problems)]
    facts += [*opaque_facts(given, problems), *expert_facts(given, problems, planning=planning), *graph_facts(given), *adapters]
    facts += [*optimizer_facts(given, problems), *parallel_facts(given, gpus, problems, left_open=planning)]
    today = today_of(given, problems, planning=planning)
    facts.append(_policy(today, given, planning=planning))
    if planning and given[FINE_GRAINED]:
        facts.append(Fact("offload_ratio", "auto", f"{given.origin(FINE_GRAINED)}: a plan offloads what pays, too"))
    ours, misread = flags_in(command.arguments)
    problems += misread
    if any(word.partition("=")[0] == SCHEDULE for word in command.arguments):
        facts.append(Fact("schedule", ours.lynx_schedule.replace("-", "_"), SCHEDULE))
    if gpus is None:
        needed = "the number of GPUs: --gpus N, or a launcher that says it (torchrun --nproc-per-node N --nnodes M)"
        problems.append(Problem("launch", "no number of processes", needed))
    else:
        facts.insert(0, Fact("gpus", gpus, counted_by))
    lacks = dict.fromkeys(container.row["unavailable"], container.name) if isinstance(container, Frontend) else {}
    if given["deterministic_mode"]:  # refused from 0.19 on
        lacks["userbuffers"] = given.origin("deterministic_mode")
    if adapters:
        lacks["userbuffers"] = adapters[0].origin
    if loss and isinstance(container, Frontend) and container.name != VERL:
        lacks["head"] = loss[0].origin
    if lacks:
        facts.append(Fact("unavailable", [*lacks], ", ".join(dict.fromkeys(lacks.values()))))
    facts = [fact for fact in facts if fact.value is not None]
    effective = [value for value in given.values.values() if value.value != given.table.default(value.flag.sets, given.release)]
    kinds = [(value, _judged(given, value)) for value in effective]
    needed = "one whose cost in memory and time is known"
    problems += [Problem(value.said, "a flag that nobody has judged", needed) for value, kind in kinds if kind is None]
    problems += _refused(
        given, today, [*_circumstances(given, planning=planning), *(["two versions"] if ours.without_flushes else [])]
    )
    priced = [(value.said, kind.why) for value, kind in kinds if kind is not None and kind.name == "priced as"]
    priced += _substitutes(given, facts)
    unknown = (words for words in given.unknown if words not in {TYPE, *FORKS} and words.split()[0] not in NEWER)
    given = replace(given, unknown=tuple(unknown))
    if strict or problems:
        problems += _mistyped(given, strict=strict)
    silent = _silent(given, [*today.flags, *(fact.origin for fact in facts), *map(str, problems), *(said for said, _ in priced)])
    silent = silent if container is None else ()  # a container has a value for everything
    no_matter = _without_matter(given) | own | ({"read, and nothing follows from it here": silent} if silent else {})
    reading = Reading(command, given, tuple(facts), tuple(priced), no_matter, tuple(problems), today)
    if container is None:
        return reading
    facts = [replace(fact, origin=container.say(fact.origin)) for fact in facts]
    reading = replace(reading, facts=tuple(facts), container=container)
    return replace(reading, problems=tuple(reading.spoken(problem) for problem in problems))


def _mistyped(given: Given, *, strict: bool = False) -> list[Problem]:
    """Flags that are like one of Megatron's; `strict`: all that it does not have. They may be the cause of other problems."""
    words = (words for words in given.unknown if strict or given.table.mistyped(words.split()[0]))
    return [given.table.unknown(option) for option in words]


def _policy(today: Today, given: Given, *, planning: bool) -> Fact:
    if planning:
        return Fact("policy", "planned", "a plan is asked for")
    name = POLICIES.get(today.setting)
    if name is None:
        return Fact("policy", "none", f"no policy is like {' '.join(today.flags)}, which is priced as Megatron has it")
    return Fact("policy", name, " ".join(today.flags) or "no stock recomputation")


def _judged(given: Given, value: Value) -> FlagKind | None:
    if value.flag.sets.startswith(EXPERTS_OWN) and not has_experts(given):
        return FlagKind("no matter", "a feature that is not switched on")
    if given[USERBUFFERS] and value.flag.sets.startswith("tp_comm_") and value.flag.sets != USERBUFFERS:
        return FlagKind("priced as", SOME_USERBUFFERS)
    return value.flag.kind


def _circumstances(given: Given, *, planning: bool) -> Iterator[str]:
    te, flex = given["transformer_impl"] == "transformer_engine", given["moe_token_dispatcher_type"] == "flex"
    planned = {"plan": True, "te": te, "flex": flex and has_experts(given)}
    always = {"any": True, "latent": given["multi_latent_attention"], "fp8": given["fp8"] or given["fp4"]}
    yield from (name for name, holds in {**always, **(planned if planning else {})}.items() if holds)


def _refused(given: Given, today: Today, circumstances: Collection[str]) -> Iterator[Problem]:
    reported = set(today.replaced)
    if not has_experts(given):
        reported.update(name for name in given.values if name.startswith(EXPERTS_OWN))
    for limit, under in limits(circumstances, ARGUMENTS):
        value = given.values.get(limit.argument)
        if value is None or limit.allows(value.value) or limit.argument in reported:
            continue
        if under == "any" and value.value == given.table.default(limit.argument, given.release):
            continue
        reported.add(limit.argument)
        state = "given" if value.flag.takes == 0 and value.said.startswith("--") else str(value.value)
        plain = state == "given" if limit.allowed else under == "any"
        needed = f"{'a launch without it' if plain else limit.needed} {CIRCUMSTANCES[under]}".rstrip()
        yield Problem(value.said, state, f"{needed}: {limit.reason}", OR_ELSE.get(under, ""))


def _without_matter(given: Given) -> dict[str, tuple[str, ...]]:
    by_subject: dict[str, tuple[str, ...]] = {}
    for value in given.values.values():
        kind = _judged(given, value)
        default = not value.value or value.value == given.table.default(value.flag.sets, given.release)
        if kind is not None and (kind.name == "no matter" or (default and kind.name == "refused")):
            subject = kind.why if kind.name == "no matter" else "not switched on"
            by_subject[subject] = (*by_subject.get(subject, ()), value.said)
    return by_subject


def _substitutes(given: Given, facts: Sequence[Fact]) -> Iterator[tuple[str, str]]:
    rows, seq = given["max_position_embeddings"], given["seq_length"]
    learned = given["position_embedding_type"] == "learned_absolute" and not given["use_rotary_position_embeddings"]
    if learned and rows != seq and "max_position_embeddings" in given.values:
        yield given.origin("max_position_embeddings"), f"a table of positions with {seq} rows"
    if has_experts(given) and given["moe_token_dispatcher_type"] == "flex":
        yield given.origin("moe_token_dispatcher_type"), DISPATCH
    for fact in facts:
        for layer_kind in fact.value if fact.place == "model.opaque" else ():
            if "kept_bytes" in layer_kind:
                kept = f"{MARGIN:g} times {layer_kind['kept_bytes']} bytes a token, read in code and not measured"
                yield fact.origin, f"{layer_kind['kind']}, kept whole, {kept}: leave room, or put a profile in place of it"
    if (predicting := predicting_of(given)) and predicting[0] != (last := stack_of(given)[-1].symbols):
        yield PATTERN_FLAG, f"{last}, the decoder's last layer, in place of {predicting[0]} for multi-token prediction"
    for fork in FORKS & {*given.unknown}:
        yield fork, "a squared ReLU: it keeps and moves as much, its own parameters apart"
    # Eager operators of Megatron's own layers save scores in fp32 and a copy in 16 bits (`FusedScaleMaskSoftmax`).
    flag = next((name for name in ("attention_softmax_in_fp32", "apply_query_key_layer_scaling") if given[name]), None)
    eager = given["transformer_impl"] == "local" and not given["masked_softmax_fusion"]
    if flag is not None and eager and (given["bf16"] or given["fp16"]):
        yield given.origin(flag), "a softmax in 16 bits: without --no-masked-softmax-fusion it saves a third as much"


def _silent(given: Given, said: Sequence[str]) -> tuple[str, ...]:
    words = {word.strip(",:;()") for text in said for word in text.split()}
    kinds = ((value, _judged(given, value)) for value in given.values.values())
    return tuple(value.said for value, kind in kinds if kind is not None and kind.name == "read" and value.said not in words)


def job_of(reading: Reading, cluster: str, changes: Mapping[str, Any] | None = None) -> Job:
    """`changes`: further values by their place (`{"budget.memory_gib": 70}`). Raises `ConfigError` with all problems."""
    problems: list[Problem] = list(reading.problems)
    if any(place.startswith("head.") for place in changes or {}):
        problems += _refused(reading.given, reading.today, ["head"])
    try:
        machine = load_cluster(cluster, "--cluster").model_dump(mode="json", exclude_none=True)
    except ConfigError as error:
        raise ConfigError(HEADLINE, [*problems, *error.problems]) from None
    if not has_experts(reading.given):
        problems += without_experts(changes or {}, "a launch with --num-experts")
    try:
        asked = (Fact(place, value, "asked for") for place, value in (changes or {}).items())
        data = as_job_data([Fact("cluster", machine, "--cluster"), *reading.facts, *asked])
        job = validated(Job, data, "launch")
    except ConfigError as error:
        # Values missing from the job because of a misread flag were reported by the flag's name.
        problems += [] if problems else error.problems
    else:
        problems += against_megatron(reading.given, reading.today, job)
    if problems:
        likely = [] if isinstance(reading.container, Frontend) else _mistyped(reading.given)
        raise ConfigError(HEADLINE, [reading.spoken(problem) for problem in dict.fromkeys([*problems, *likely])])
    return job


MASK = "create_attention_mask_in_dataloader"


def understood(reading: Reading) -> WrappedTable:
    columns = ("job", "value", "from")
    table = WrappedTable(columns, words=columns)
    for fact in reading.facts:
        value = ("yes" if fact.value else "no") if isinstance(fact.value, bool) else str(fact.value)
        table.add(fact.place, value, fact.origin, style="dim" if fact.origin == "Megatron's default" else "")
    return table


def remarks(reading: Reading) -> Iterator[str]:
    releases = reading.given.releases
    if not reading.problems:
        yield f"Megatron {releases[0]}" + (f" to {releases[-1]}" if len(releases) > 1 else "") + " takes these flags"
    if reading.today.flags:
        yield f"today: {reading.today.name}, by {' '.join(reading.today.flags)}"
    for flag, instead in reading.priced_as:
        yield f"{flag}: counted as {instead}"
    subjects = [f"{subject} ({' '.join(flags)})" for subject, flags in reading.no_matter.items()]
    if subjects:
        yield f"no matter for activations and their seconds: {', '.join(subjects)}"


def unknown_in_words(reading: Reading) -> str | None:
    given = reading.given
    if not given.unknown:
        return None
    if isinstance(reading.container, Frontend):
        return f"not read, and not counted: {', '.join(given.unknown)}"
    names = []
    for words in given.unknown:
        close = given.table.mistyped(words.split()[0])
        names.append(words if close is None else f"{words} (did you mean {close}?)")
    releases = f"{given.table.releases[0]} to {given.table.releases[-1]}"
    return (
        f"not known to Megatron {releases}, read as your script's own (up to the next flag) and not counted: {', '.join(names)}"
    )


LARGE_MASK_BYTES = 2**28


def unsaid(reading: Reading) -> Iterator[str]:
    given, data = reading.given, reading.job_data
    model, batch = data.get("model", {}), data.get("batch", {})
    if model.get("dtype") == "fp32":
        yield f"{reading.said(['--bf16'])} is not given: weights, activations and GEMMs are in fp32"
    if DISPATCHER not in given.values and model.get("experts", {}).get("dispatcher") == "allgather":
        default = "Megatron's default, allgather, brings every token to all ranks of the group"
        yield f"--{DISPATCHER.replace('_', '-')} is not given: {default}; alltoall, to those of its experts"
    rows = model.get("seq", 0) // data.get("parallel", {}).get("context", 1)
    mask_bytes = batch.get("micro", 0) * rows * model.get("seq", 0)
    masks = Path(reading.command.script or "").name.startswith("pretrain_") and bool(given[MASK])
    if masks and not batch.get("packed") and mask_bytes >= LARGE_MASK_BYTES:
        where = "of a micro-batch on the first and the last stage, which is not counted"
        yield f"--no-{MASK.replace('_', '-')} is not given: a mask of {format_bytes(mask_bytes)} {where}"


def as_json(reading: Reading) -> dict[str, object]:
    return {
        "facts": [{"place": fact.place, "value": fact.value, "from": fact.origin} for fact in reading.facts],
        "today": {"setting": reading.today.name, "flags": list(reading.today.flags)},
        "unknown": list(reading.given.unknown),
        "unsaid": list(unsaid(reading)),
        "priced_as": dict(reading.priced_as),
        "no_matter": {subject: list(flags) for subject, flags in reading.no_matter.items()},
        "releases": list(reading.given.releases),
    }


RANK = "dim"
SECTIONS = {VERL: ("actor_rollout_ref.model.lora", "model.lora"), NEMO: ("policy.megatron_cfg.peft",)}
RENAMED = {VERL: {RANK: "rank", "lora_dtype": "dtype"}, NEMO: {}, SWIFT: {RANK: "lora_rank", "dropout": "lora_dropout"}}
USUAL = {"a2a_experimental": False, "exclude_modules": [], "lora_dtype": None, "sequence_parallel_input_regather": False}
DEFAULTS = {RANK: 32, "dropout": 0.0, "dropout_position": "pre", "target_modules": list(LINEARS)}
SWIFTS = {RANK: 8, "dropout": 0.05}
TUNER, ALL = "tuner_type", "all-linear"


def adapter_facts(launch: Container | Frontend | None, problems: list[Problem], *, planning: bool) -> Iterator[Fact]:
    """Yield the low-rank adapters of a launch: Megatron-Bridge's `LoRA`, which verl and NeMo-RL build, too.

    ms-swift's adapters are priced as Bridge's, which save as much or, with sequence parallelism, more. They need its backend
    mcore-bridge (1.6.5), whose layers replace Megatron's rotary function during their forward. A recomputation would call
    Megatron's, so plans are refused."""
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
