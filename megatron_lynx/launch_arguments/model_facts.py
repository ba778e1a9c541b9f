"""The model, its loss and the optimizer of a launch, with Megatron's defaults (`validate_args`, `OptimizerConfig`).

hidden ─ 4 h, or with SwiGLU 64 floor(8 h / 3 / 64) ─> ffn          heads ─ without --group-query-attention ─> kv_groups
vocab_size (+ 1: NullTokenizer before 0.18) ─ up to a multiple of --make-vocab-size-divisible-by x tensor ─> vocab"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.fp8_recipes import STORED
from megatron_lynx.kinds.latent.section import INDEXER, SIZES, trained_on
from megatron_lynx.launch_arguments.frontend import NEMO, SWIFT, VERL, Frontend
from megatron_lynx.launch_arguments.given import Fact, Given, facts_in
from megatron_lynx.whole_file import json_in

NULL_TOKENIZER_ADDS_ONE = ("0.16", "0.17")
"""Releases whose NullTokenizer adds an end-of-document token to the given entries."""

GPT2, GPT2_ENTRIES = "GPT2BPETokenizer", 50257


def model_facts(given: Given, problems: list[Problem]) -> Iterator[Fact]:
    for place, names in {
        "layers": ("num_layers", "encoder_num_layers"),
        "hidden": ("hidden_size",),
        "heads": ("num_attention_heads",),
        "seq": ("seq_length", "encoder_seq_length"),
    }.items():
        value = next((given[name] for name in names if given[name] is not None), None)
        if value is not None:
            yield Fact(f"model.{place}", value, given.origin(*names))
        elif not any(name in given.values for name in names):
            problems.append(Problem(f"--{names[0].replace('_', '-')}", "nothing", "this flag"))
    yield from _widths(given, problems)
    yield from _vocabulary(given, problems)
    yield from _kinds(given, problems)
    yield from facts_in(given, {f"model.{name}": name for name in ("attention_dropout", "hidden_dropout")})
    yield from _fp8(given, problems)
    yield from _latent(given, problems)


def _widths(given: Given, problems: list[Problem]) -> Iterator[Fact]:
    hidden, heads = given["hidden_size"], given["num_attention_heads"]
    if (ffn := ffn_of(given)) is not None:
        yield Fact("model.ffn", *ffn)
    if given[LATENT] and heads:
        yield Fact("model.kv_groups", heads, "heads: latent attention has keys for every head")
    elif given["group_query_attention"]:
        yield Fact("model.kv_groups", given["num_query_groups"], given.origin("num_query_groups", "group_query_attention"))
    elif heads:
        yield Fact("model.kv_groups", heads, "heads: no --group-query-attention")
    size = given["kv_channels"]
    if size is not None and hidden and heads and size * heads != hidden:
        yield Fact("model.kv_channels", size, given.origin("kv_channels"))


def ffn_of(given: Given) -> tuple[int, str] | None:
    hidden = given["hidden_size"]
    if given["ffn_hidden_size"] is not None:
        return given["ffn_hidden_size"], given.origin("ffn_hidden_size")
    if not hidden:
        return None
    if given["swiglu"]:
        return int(4 * hidden * 2 / 3 / 64) * 64, "64 floor(8/3 hidden / 64): no --ffn-hidden-size"
    return 4 * hidden, "4 hidden: no --ffn-hidden-size"


def _vocabulary(given: Given, problems: list[Problem]) -> Iterator[Fact]:
    if given["padded_vocab_size"] is not None:
        yield Fact("model.vocab", given["padded_vocab_size"], given.origin("padded_vocab_size"))
        return
    size, origin = given["vocab_size"], given.origin("vocab_size")
    if size is None and given["vocab_file"] is not None:
        size, origin = _entries(Path(given["vocab_file"])), given.origin("vocab_file")
    elif size is not None and given["tokenizer_type"] == "NullTokenizer" and given.release in NULL_TOKENIZER_ADDS_ONE:
        size, origin = size + 1, f"{origin} + 1: NullTokenizer"
    if size is None and "vocab_size" not in given.values and given["tokenizer_type"] in (None, GPT2):
        size, origin = GPT2_ENTRIES, "GPT-2's entries: no --vocab-size"
    if size is None:
        if "vocab_size" not in given.values:
            todo = f"add --vocab-size N (for planning): {given['tokenizer_type']} is not loaded here"
            problems.append(Problem("--vocab-size", "nothing", "the entries of the tokenizer", todo))
        return
    multiple = given["make_vocab_size_divisible_by"] * (given["tensor_model_parallel_size"] or 1)
    if given["pad_vocab_size"] is False:
        yield Fact("model.vocab", size, origin)
    else:
        padded = -(-size // multiple) * multiple
        yield Fact("model.vocab", padded, f"{origin} ({size}), padded to a multiple of {multiple}")


def _entries(path: Path) -> int | None:
    try:
        return len(json_in(path, "a vocabulary"))
    except ConfigError:
        return None


def _kinds(given: Given, problems: list[Problem]) -> Iterator[Fact]:
    yield _activation(given)
    if given["activation_func_clamp_value"] is not None:
        yield Fact("model.activation_clamped", True, given.origin("activation_func_clamp_value"))
    yield Fact("model.norm", str(given["normalization"]).lower(), given.origin("normalization"))
    yield Fact("model.bias", given["add_bias_linear"], given.origin("add_bias_linear"))
    yield from facts_in(given, {"model.mtp": "mtp_num_layers", "model.qk_norm": "qk_layernorm"}, on=True)
    yield from _fusions(given)
    untied = given["untie_embeddings_and_output_weights"]
    yield Fact("model.tied_embeddings", not untied, given.origin("untie_embeddings_and_output_weights"))
    yield _position(given, problems)
    if given["transformer_impl"] not in ("local", "transformer_engine", None):
        problems.append(Problem("--transformer-impl", str(given["transformer_impl"]), "local or transformer_engine"))
    implementation = "local" if given["transformer_impl"] == "local" else "transformer_engine"
    yield Fact("model.implementation", implementation, given.origin("transformer_impl"))
    yield from _attention(given)
    if given["cross_entropy_loss_fusion"]:
        name = "cross_entropy_fusion_impl"
        yield Fact("model.cross_entropy", given[name], f"{given.origin('cross_entropy_loss_fusion')}, {given.origin(name)}")
    yield from facts_in(given, {"model.deterministic": "deterministic_mode"}, on=True)
    half = given["bf16"] or given["fp16"]
    origin = f"{given.origin('fp16')}: the same bytes and peak" if given["fp16"] else given.origin("bf16")
    yield Fact("model.dtype", "bf16" if half else "fp32", origin)


def _fusions(given: Given) -> Iterator[Fact]:
    """The fusions, if a flag disables one. Without `jit_fuser` nothing is compiled; squared ReLU is not fused with its bias."""
    flags = {
        "bias_dropout": "bias_dropout_fusion",
        "bias_activation": "bias_swiglu_fusion" if given["swiglu"] else "bias_gelu_fusion",
        "rope": "apply_rope_fusion",
    }
    if given["transformer_impl"] == "local":  # Transformer Engine's attention has its own softmax
        flags["masked_softmax"] = "masked_softmax_fusion"
    if given["squared_relu"] or of_a_fork(given):
        del flags["bias_activation"]
    off = {fusion: flag for fusion, flag in flags.items() if not given[flag]}
    if given["disable_jit_fuser"]:
        off |= dict.fromkeys({"bias_dropout", "bias_activation"} & flags.keys(), "disable_jit_fuser")
    if off:
        yield Fact("model.fusions", [fusion for fusion in flags if fusion not in off], given.origin(*off.values()))


FORKS = frozenset({"--xielu", "--xiprelu", "--xiprelup"})
"""Activations of Swiss AI's fork: each is compiled to one kernel that saves its input, like squared ReLU."""


def of_a_fork(given: Given) -> str | None:
    return next((words for words in given.unknown if words in FORKS), None)


def _activation(given: Given) -> Fact:
    if (fork := of_a_fork(given)) is not None:
        return Fact("model.activation", "squared_relu", fork)
    if (name := next((name for name in ("squared_relu", "quick_geglu") if given[name]), None)) is not None:
        return Fact("model.activation", name, given.origin(name))
    return Fact("model.activation", "swiglu" if given["swiglu"] else "gelu", given.origin("swiglu"))


def _position(given: Given, problems: list[Problem]) -> Fact:
    embedding = "rope" if given["use_rotary_position_embeddings"] else given["position_embedding_type"]
    known = {"learned_absolute": "learned", "rope": "rope", "yarn": "rope", "none": "rope"}
    origin = given.origin("use_rotary_position_embeddings", "position_embedding_type")
    origin += " none: counted as rope, which keeps more" if embedding == "none" else ""
    if embedding not in known:
        problems.append(Problem(origin, str(embedding), f"one of {', '.join(known)}", "other positions are not modelled"))
    if known.get(embedding) == "learned" and given["add_position_embedding"] is False:
        problems.append(Problem(given.origin("add_position_embedding"), "given", "--position-embedding-type rope beside it"))
    return Fact("model.position", known.get(embedding, "rope"), origin)


def _attention(given: Given) -> Iterator[Fact]:
    if given["transformer_impl"] == "local":
        yield Fact("model.attention", "unfused", given.origin("transformer_impl"))
        return
    asked, origin = given["attention_backend"], given.origin("attention_backend")
    yield Fact("model.attention", "unfused" if asked in ("unfused", "local") else "flash", origin)
    version, pinned = given["flash_attention_version"], given.origin("flash_attention_version")
    if version == 2 or (asked == "flash" and version is None):
        why = f"{origin} flash, unless FlashAttention-3 is installed" if version is None else pinned
        yield Fact("model.attention_kernel", "flash_attention_2", why)


LATENT = "multi_latent_attention"
VARIANT, SPARSE = "experimental_attention_variant", "dsa"


def _sparse(given: Given, problems: list[Problem]) -> Iterator[Fact]:
    if given[VARIANT] != SPARSE:
        return
    if absent := [f"--{flag.replace('_', '-')}" for flag in (LATENT, *INDEXER.values()) if not given[flag]]:
        problems.append(Problem(given.origin(VARIANT), SPARSE, f"{', '.join(absent)} beside it", "Megatron stops here"))
        return
    yield from facts_in(given, {f"model.latent.sparse.{size}": flag for size, flag in INDEXER.items()})
    loss = trained_on(given["dsa_indexer_loss_coeff"], given["dsa_indexer_use_sparse_loss"])
    yield Fact("model.latent.sparse.loss", loss, given.origin("dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss"))
    yield Fact("model.latent.sparse.fused", given["dsa_kernel_backend"] != "none", given.origin("dsa_kernel_backend"))
    yield Fact("model.latent.sparse.shared", given["dsa_indexer_topk_freq"] > 1, given.origin("dsa_indexer_topk_freq"))


def _latent(given: Given, problems: list[Problem]) -> Iterator[Fact]:
    yield from _sparse(given, problems)
    if not given[LATENT]:
        return
    yield from facts_in(given, {f"model.latent.{size}": flag for size, flag in SIZES.items()})
    positions = "rope" if given["use_rotary_position_embeddings"] else given["position_embedding_type"]
    if given["apply_rope_fusion"] and positions == "rope":  # the only one that Megatron fuses
        yield Fact("model.latent.fused_rotary", True, given.origin("apply_rope_fusion"))
        if given["rope_type"] == "rope":
            needed = "--rope-type yarn, or --no-rope-fusion: Megatron fuses no other with latent attention"
            problems.append(Problem(given.origin("rope_type"), "rope", needed))


def _fp8(given: Given, problems: list[Problem]) -> Iterator[Fact]:
    bits = next((bits for bits in ("fp8", "fp4") if given[bits]), None)
    if bits is None:
        return
    flag, number_format, recipe = given.origin(bits), given[bits], given[f"{bits}_recipe"]
    yield Fact("model.fp8.format", number_format, flag)
    if recipe == "custom":
        known = [known for known in STORED if (known == "nvfp4") == (bits == "fp4")]
        problems.append(Problem(given.origin(f"{bits}_recipe"), recipe, " or ".join(known)))
    else:
        yield Fact("model.fp8.recipe", recipe, given.origin(f"{bits}_recipe"))
    if given["fp8_param_gather"]:
        held = given.origin("fp8_param_gather")
        yield Fact("model.fp8.parameters", True, held)
        if recipe == "mxfp8" and not given["reuse_grad_buf_for_mxfp8_param_ag"]:
            why = "weights would be there in 16 bits as well, which is not counted"
            problems.append(Problem(held, "given", "--reuse-grad-buf-for-mxfp8-param-ag beside it", why))
    if given["first_last_layers_bf16"]:
        for place, name in (("first", "num_layers_at_start_in_bf16"), ("last", "num_layers_at_end_in_bf16")):
            yield Fact(
                f"model.fp8.{place}_in_bf16", given[name], f"{given.origin('first_last_layers_bf16')}, {given.origin(name)}"
            )


AWARE = "use_precision_aware_optimizer"
SUM_IN_FP32 = "accumulate_allreduce_grads_in_fp32"
ON_HOST, SHARE, OVERLAPPED = "optimizer_cpu_offload", "optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d"
OF_THE_HOST = (ON_HOST, SHARE, OVERLAPPED)
CHUNKED, LEGACY = "--chunked-optimizer-state-offload", "--offload-optimizer-states"
CHUNK, FRACTION = "--optimizer-state-offload-chunk-size-mb", "--optimizer-state-offload-fraction"
NEWER = (CHUNKED, LEGACY, CHUNK, FRACTION)
"""Flags of Megatron's dev branch, newer than 0.19."""

STATE = {"optimizer.first_moment": "exp_avg_dtype", "optimizer.second_moment": "exp_avg_sq_dtype"}
MUONS = {"muon": 1, "dist_muon": 1, "adaptive_muon": 2}
"""State elements per element of a layer's weight."""
STATES = {"adam": 2, "sgd": 1, "lion": 1, "ademamix": 3}
"""State elements in fp32 per parameter, including forks' optimizers. SOAP is missing: its preconditioners are whole matrices."""


def optimizer_facts(given: Given, problems: list[Problem]) -> Iterator[Fact]:
    yield _gradients(given, problems)
    yield from _states(given, problems)
    yield from _states_on_host(given, problems)
    if not given[AWARE]:
        return
    yield from facts_in(given, {"optimizer.precision_aware": AWARE})
    if given[ON_HOST]:
        yield Fact("optimizer.offload", given[SHARE], given.origin(SHARE if SHARE in given.values else ON_HOST))
        yield from facts_in(given, {"optimizer.overlap_copies": OVERLAPPED})
    yield from facts_in(given, STATE)
    if given["main_params_dtype"] == "fp32" and given["bf16"]:
        yield Fact("optimizer.main_parameters", "remainder", f"{given.origin(AWARE)}: fp32, less what the bf16 weights have")
    else:
        yield Fact("optimizer.main_parameters", given["main_params_dtype"], given.origin("main_params_dtype"))


def _states(given: Given, problems: list[Problem]) -> Iterator[Fact]:
    name, origin = str(given["optimizer"]), given.origin("optimizer")
    if name not in (*STATES, *MUONS):
        needed = f"one of {', '.join((*STATES, *MUONS))}"
        problems.append(Problem(origin, name, needed, "what others remember is not known"))
        return
    if name == "adam":
        return
    if name in MUONS:
        yield Fact("optimizer.muon_steps", given["muon_num_ns_steps"], given.origin("muon_num_ns_steps", "optimizer"))
        yield Fact("optimizer.matrix_states", MUONS[name], f"{origin} {name}")
        name, origin = str(given["muon_scalar_optimizer"] or "adam"), given.origin("muon_scalar_optimizer", "optimizer")
    states = 0 if name == "sgd" and not given["sgd_momentum"] else STATES[name]
    yield Fact("optimizer.states", states, f"{origin} {name}: so many numbers beside each parameter in fp32")


def _states_on_host(given: Given, problems: list[Problem]) -> Iterator[Fact]:
    flag = next((flag for flag in (CHUNKED, LEGACY) if given.unknown_value(flag) is not None), None)
    if flag is None:
        return
    if given[ON_HOST]:
        problems.append(Problem(flag, f"also {given.origin(ON_HOST)}", "one of them: Megatron refuses both"))
    if given["optimizer"] != "adam" and (flag == LEGACY or given["optimizer"] != "muon"):
        problems.append(Problem(flag, f"also --optimizer {given['optimizer']}", "--optimizer adam, or muon with " + CHUNKED))
    for place, option, default in (("states_on_host", FRACTION, 1.0), ("chunk_mib", CHUNK, 0)):
        word = given.unknown_value(option)
        try:
            value = default if word is None else type(default)(word)
        except ValueError:
            problems.append(Problem(option, word or "nothing", "a number"))
        else:
            yield Fact(f"optimizer.{place}", value, flag if word is None else option)


def _gradients(given: Given, problems: list[Problem]) -> Fact:
    place, summed = "optimizer.gradients", given.origin(SUM_IN_FP32)
    if given["fp16"]:
        if given[SUM_IN_FP32]:
            return Fact(place, "fp32", summed)
        return Fact(place, "bf16", f"{given.origin('fp16')} without --accumulate-allreduce-grads-in-fp32: fp16, the same bytes")
    if not given["bf16"]:
        return Fact(place, "fp32", "as the weights")
    if given["main_grads_dtype"] == "bf16":
        if given[SUM_IN_FP32]:
            needed = "--main-grads-dtype fp32: Megatron refuses both"
            problems.append(Problem(summed, f"also {given.origin('main_grads_dtype')} bf16", needed))
        return Fact(place, "bf16", given.origin("main_grads_dtype"))
    if given["grad_reduce_in_bf16"]:
        return Fact(place, "bf16", given.origin("grad_reduce_in_bf16"))
    return Fact(place, "fp32", summed if given[SUM_IN_FP32] else f"{given.origin('bf16')}: gradients are added up in fp32")


SLIME = ENTROPY, TEMPERATURE, AGAIN = "--entropy-coef", "--rollout-temperature", "--recompute-loss-function"
FUSED_CHUNK = 256


class Loss(NamedTuple):
    origin: str
    peak_bytes: float
    saved_bytes: float
    weight_bytes: float = 0


def log_probability_facts(given: Given, launch: object, *, of_slime: bool) -> Iterator[Fact]:
    """Yield the loss that a frontend computes from logits; nothing if Megatron computes it, or if it is unknown.

    Bytes per logit, the model's output included, counted on CPU ranks (TP1 and TP2, a 16-bit model, fp32 logits) with the
    functions of slime 624b824a, verl b178a3cd, NeMo-RL 7ea279ab and ms-swift 3602360a:

                                             peak   saved
        verl                                    8       4
          entropy_coeff                        12      12    its copy of the logits, their softmax and the loss's
        slime                                   8       4
          --rollout-temperature other than 1   12       4
          --entropy-coef                       12       8
          --recompute-loss-function            +4       4    with the entropy and a temperature
        ms-swift, grpo                         12       4    with tensor parallelism 16 and 8
          log_entropy, top_entropy_quantile    +4
        NeMo-RL                                12       4    with defer_fp32_logits 14
          logprob_chunk_size                  10+20c    4    c: share of the tokens in a chunk; with defer_fp32_logits 4+32c and 2
          use_fused_linear_logprobs            26c      0    and 17 per weight of the output layer, whose gradient is in fp32
    """
    loss = _of_slime(given) if of_slime else _of_frontend(given, launch) if isinstance(launch, Frontend) else None
    if loss is not None:
        for name in ("peak_bytes", "saved_bytes", "weight_bytes"):
            yield Fact(f"model.log_probabilities.{name}", getattr(loss, name), loss.origin)


def _of_slime(given: Given) -> Loss:
    entropy, scaled = (float(given.unknown_value(option) or usual) != usual for option, usual in ((ENTROPY, 0), (TEMPERATURE, 1)))
    again = given.unknown_value(AGAIN) is not None
    options = [option for option, is_set in ((ENTROPY, entropy), (TEMPERATURE, scaled), (AGAIN, again)) if is_set]
    peak = (12 if entropy or scaled else 8) + (4 if entropy and scaled and again else 0)
    return Loss(", ".join(["slime's log-probabilities", *options]), peak, 8 if entropy and not again else 4)


def _of_frontend(given: Given, launch: Frontend) -> Loss | None:
    origin = f"{launch.name}'s log-probabilities"
    if launch.name == VERL:
        keys = (f"actor_rollout_ref.actor.{name}" for name in ("entropy_coeff", "calculate_entropy"))
        key = next(filter(launch.get, keys), None)
        return Loss(origin, 8, 4) if key is None else Loss(f"{origin}, {launch.origin(key)}", 12, 12)
    if launch.name == SWIFT:
        return _of_swift(given, launch, origin) if launch.mode == "rlhf" and launch.get("rlhf_type") == "grpo" else None
    if launch.name != NEMO or launch.mode.rpartition("/")[2].startswith(("run_rm", "run_distillation", "run_xtoken")):
        return None
    return _of_nemo(given, launch, origin)


def _of_swift(given: Given, launch: Frontend, origin: str) -> Loss:
    split = (given["tensor_model_parallel_size"] or 1) > 1
    entropy = launch.get("log_entropy") or (launch.get("top_entropy_quantile") or 1) < 1
    return Loss(origin, (16 if split else 12) + (4 if entropy else 0), 8 if split else 4)


def _of_nemo(given: Given, launch: Frontend, origin: str) -> Loss:
    sequences, context = given["micro_batch_size"] or 1, given["context_parallel_size"] or 1
    tokens = (given["seq_length"] or 1) * sequences // context
    settings = "policy.megatron_cfg"
    fused, deferred, chunk = f"{settings}.use_fused_linear_logprobs", f"{settings}.defer_fp32_logits", "policy.logprob_chunk_size"
    if launch.get(fused):
        rows = launch.get(f"{fused.replace('use_', '')}_chunk_size") or FUSED_CHUNK
        return Loss(launch.origin(fused), 26 * min(1, rows / tokens), 0, 17)
    whole = not launch.get(deferred)
    if not (rows := launch.get(chunk)):
        return Loss(origin if whole else f"{origin}, {launch.origin(deferred)}", 12 if whole else 14, 4)
    part = min(1, rows * sequences / tokens)
    return Loss(f"{origin}, {launch.origin(chunk)}", 10 + 20 * part if whole else 4 + 32 * part, 4 if whole else 2)
