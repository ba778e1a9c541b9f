"""A launch's own settings for activation memory, which a plan is compared with, and which the launch under a plan leaves out.

Flags of graphs and of overlapped exchanges stay where a plan can run with them (`graph_facts`, `stays_overlapped`). Captured code
runs without the host, and so without our hooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron_lynx.errors import Problem
from megatron_lynx.kinds.captured import BESIDE as CAPTURABLE
from megatron_lynx.kinds.captured import CAPTURED_MODULES, captures_nothing, refused_capture
from megatron_lynx.launch_arguments.given import Fact, Given
from megatron_lynx.stock import setting as stock
from megatron_lynx.stock.legality import Facts, objections
from megatron_lynx.stock.setting import Fact as StockFact

if TYPE_CHECKING:
    from megatron_lynx.config import Job

GRAPHS_BY, LOCAL, EXTERNAL = "cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"
GRAPH_MODULES = ("cuda_graph_modules", "cuda_graph_scope", "cuda_graph_scope_deprecated")
RANDOM = ("te_rng_tracker", "inference_rng_tracker")
GRAPHS = (GRAPHS_BY, LOCAL, EXTERNAL)
OF_GRAPHS = (*GRAPHS, *GRAPH_MODULES, "cuda_graph_warmup_steps", *RANDOM)
NOT_TRIED = ("mtp_num_layers", "overlap_moe_expert_parallel_comm", "tp_comm_overlap", "hybrid_layer_pattern")
GRANULARITY, METHOD, LAYERS, MODULES = (f"recompute_{name}" for name in ("granularity", "method", "num_layers", "modules"))
FINE_GRAINED, OFFLOAD, FRACTION = "fine_grained_activation_offloading", "offload_modules", "activation_offload_fraction"
BY_LAYERS = "cpu_offloading_num_layers"
SHARED_OUT = "distribute_saved_activations"
SWITCHES = (
    *("recompute_activations", GRANULARITY, "moe_layer_recompute", SHARED_OUT, FINE_GRAINED, BY_LAYERS),
    *(stock.OVERLAP, stock.DELAYED, stock.DEFERRED_HEAD, *GRAPHS),
)

REPLACED = (
    *SWITCHES,
    *(METHOD, LAYERS, MODULES, OFFLOAD, FRACTION, "min_offloaded_tensor_size", "delta_offload_bytes_across_pp_ranks"),
    *("delay_offload_until_cuda_graph", "fine_grained_offloading_max_inflight_offloads"),
    *("cpu_offloading_retain_pinned_cpu_buffers", "ep_overlap_early_attn_memory_release"),
    stock.DEFERRED_AT_MOST,
    *OF_GRAPHS[len(GRAPHS) :],
)
BESIDE = (stock.OVERLAP, stock.DELAYED, "ep_overlap_early_attn_memory_release")
STOPS = "Megatron stops here"
NOT_PRICED = {
    BY_LAYERS: "what Transformer Engine copies of whole layers, and when it waits for it, is not recorded",
    SHARED_OUT: "inputs that tensor-parallel ranks share out, and gather again, are not priced",
}

OF_FLAGS: Mapping[StockFact, str] = {
    "grouped_gemm": "moe_grouped_gemm",
    "shared_overlap": "moe_shared_expert_overlap",
    "op_fuser": "use_transformer_engine_op_fuser",
}
"""Facts that the flags of a launch state, in place of those that its job assumes."""
LOWER_BOUND = {"min_offloaded_tensor_size": stock.LEAST_ELEMENTS, "delta_offload_bytes_across_pp_ranks": 0}


@dataclass(frozen=True)
class Today:
    setting: stock.StockSetting = stock.NONE
    flags: tuple[str, ...] = ()
    not_priced: tuple[str, ...] = ()
    beside: bool = False
    graphs: bool = False
    """Whether anything is captured; then host time is priced as zero."""
    graph_flags: tuple[str, ...] = ()
    alone: str = ""
    keeps_graphs: bool = False

    @property
    def beside_graphs(self) -> Today:
        flags = tuple(flag for flag in self.flags if flag not in self.graph_flags)
        return replace(self, flags=flags, keeps_graphs=True)

    @property
    def replaced(self) -> tuple[str, ...]:
        kept = (*(BESIDE if self.beside else ()), *(OF_GRAPHS if self.keeps_graphs else ()))
        return tuple(name for name in REPLACED if name not in kept) if self.flags else ()

    @property
    def name(self) -> str:
        if self.setting == stock.NONE and self.not_priced:
            return "stock"
        return f"stock {self.setting.name}{', graphs' if self.graphs else ''}"


def stays_overlapped(given: Given) -> bool:
    """Whether exchanges of experts stay overlapped under a plan. Megatron frees the rows of an FP8 expert alone on a rank."""
    alone = given["num_experts"] == (given["expert_model_parallel_size"] or 1)
    return bool(given[stock.OVERLAP]) and not ((given["fp8"] or given["fp4"]) and alone)


def today_of(given: Given, problems: list[Problem], *, planning: bool = False) -> Today:
    """Read the settings. Those that Megatron refuses for any model are added to `problems`. `planning`: for a plan."""
    problems += _contradictions(given)
    beside = planning and stays_overlapped(given)
    said = [name for name in REPLACED if name in given.values and not (beside and name in BESIDE)]
    graphs = captures(given)
    said = [name for name in said if graphs or name not in OF_GRAPHS]
    switched_on = any(given.is_on(name) for name in said if name in SWITCHES)
    flags = tuple(dict.fromkeys(map(given.origin, said))) if switched_on else ()
    not_priced = tuple(f"{given.origin(name)}: {why}" for name, why in NOT_PRICED.items() if given[name])
    if given[FINE_GRAINED]:
        unpriced_names = [name for name, least in LOWER_BOUND.items() if given[name] not in (None, least)]
        not_priced += tuple(f"{given.origin(name)}: only Megatron's default is priced" for name in unpriced_names)
    of_graphs = tuple(given.origin(name) for name in said if name in OF_GRAPHS)
    return Today(_setting(given), flags, not_priced, beside, graphs, of_graphs, why_alone(given))


def against_megatron(given: Given, today: Today, job: Job) -> Iterator[Problem]:
    """The refusals of the newest release, if every release that accepts the launch's flags refuses its setting for this job."""
    whys = []
    for release in given.releases:
        whys.append([*objections(today.setting, _facts(given, job, release), "config", "launch")])
    if all(whys):
        where = " ".join([*today.flags, *([given.origin(stock.OVERLAP)] if today.beside else [])])
        yield from (Problem(where, why, "", f"{STOPS}: drop what it refuses") for why in whys[-1])


def cannot_train(given: Given, today: Today, job: Job) -> str | None:
    return next(objections(today.setting, _facts(given, job, given.release), "training"), None)


def _facts(given: Given, job: Job, release: str) -> Facts:
    facts = Facts.of(job, release)
    said = {name for name, field in OF_FLAGS.items() if given[field]}
    known = facts.has - OF_FLAGS.keys() | (said if "experts" in facts.has else said - {"grouped_gemm"})
    return replace(facts, has=known)


def _setting(given: Given) -> stock.StockSetting:
    overlap, delayed = bool(given[stock.OVERLAP]), bool(given[stock.DELAYED])
    head = given[stock.DEFERRED_AT_MOST] if given[stock.DEFERRED_HEAD] else None
    layered = bool(given["moe_layer_recompute"])
    granularity = given[GRANULARITY] or ("selective" if given["recompute_activations"] or layered else None)
    offload = tuple(given[OFFLOAD] or ()) if given[FINE_GRAINED] else ()
    offload = _in_order(offload, [*stock.OFFLOADED])
    fraction = given[FRACTION] if offload and given[FRACTION] is not None else stock.WHOLE
    if granularity == "full":
        return stock.StockSetting((), given[METHOD], given[LAYERS], offload, fraction, overlap, delayed, head)
    modules = (*(given[MODULES] or ("core_attn",)), *(["moe"] if layered else [])) if granularity else ()
    recompute = _in_order(modules, [*stock.RECOMPUTED])
    return stock.StockSetting(recompute, None, None, offload, fraction, overlap, delayed, head)


def _in_order(names: tuple[str, ...], known: list[str]) -> tuple[str, ...]:
    return (*(name for name in known if name in names), *(name for name in dict.fromkeys(names) if name not in known))


def _contradictions(given: Given) -> Iterator[Problem]:
    granularity, stages = given[GRANULARITY], given["pipeline_model_parallel_size"] or 1
    selective, full = given["recompute_activations"] or granularity == "selective", granularity == "full"
    head, head_at_most = bool(given[stock.DEFERRED_HEAD]), given[stock.DEFERRED_AT_MOST]
    rules = (
        (full and not selective and given[METHOD] is None, GRANULARITY, "--recompute-method uniform (or block) beside it"),
        (full and not selective and given[LAYERS] is None, GRANULARITY, "--recompute-num-layers 1 (or more) beside it"),
        (selective and given[METHOD] is not None, METHOD, "no such flag with selective recomputation"),
        (selective and given[LAYERS] is not None, LAYERS, "no such flag with selective recomputation"),
        (head and stages == 1, stock.DEFERRED_HEAD, "--pipeline-model-parallel-size 2 (or more)"),
        (head and given["gradient_accumulation_fusion"] is False, stock.DEFERRED_HEAD, "no --no-gradient-accumulation-fusion"),
        (head and head_at_most < 0, stock.DEFERRED_AT_MOST, "0 (all micro-batches) or more"),
    )
    for broken, name, needed in rules:
        if broken:
            yield Problem(given.origin(name), "given" if given[name] is True else str(given[name]), needed, STOPS)


def captures(given: Given) -> bool:
    return not captures_nothing(*_captured(given), hybrid=given["hybrid_layer_pattern"] is not None)


def why_alone(given: Given) -> str:
    if not captures(given):
        return ""
    implementation, modules = _captured(given)
    hybrid = given["hybrid_layer_pattern"] is not None
    if (refused := refused_capture(implementation, modules, hybrid=hybrid)) is not None:
        refused_setting, why = refused
        return f"{refused_setting}: {why}; nearest: --cuda-graph-impl {CAPTURABLE}"
    if {"attn", "mlp"}.issubset(modules) and not given["num_experts"]:
        return "attn and mlp: nothing is left to recompute, to offload or to fill"
    tried = ("tp_comm_overlap",) if (given["tensor_model_parallel_size"] or 1) == 1 else ()
    beside = next((name for name in NOT_TRIED if given[name] and name not in tried), None)
    return "" if beside is None else f"{given.origin(beside)}: beside it and graphs nothing was tried"


def graph_facts(given: Given) -> Iterator[Fact]:
    if captures(given) and not why_alone(given):
        _, named = _captured(given)
        origin = given.origin(*(name for name in GRAPH_MODULES if given[name]), GRAPH_MODULES[0])
        yield Fact("model.captured", [module for module in CAPTURED_MODULES if module in named], origin)


def _captured(given: Given) -> tuple[str, tuple[str, ...]]:
    implementation = "transformer_engine" if given[EXTERNAL] else str(given[GRAPHS_BY] or "none")
    named = next((given[name] for name in GRAPH_MODULES if given[name]), ())
    return "local" if given[LOCAL] else implementation, tuple(str(module) for module in named if str(module) != "full")
