"""Losses that a frontend computes from logits: log-probabilities, and the entropy.

Bytes per logit, the model's output included, counted on CPU ranks (TP1 and TP2, a 16-bit model, fp32 logits) with the functions
of slime 624b824a, verl b178a3cd, NeMo-RL 7ea279ab and ms-swift 3602360a:

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
      use_fused_linear_logprobs            26c      0    and 17 bytes per weight of the output layer, whose gradient is in fp32
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megatron_lynx.launch_arguments.frontend import NEMO, SWIFT, VERL, Frontend
from megatron_lynx.launch_arguments.given import Fact, Given

SLIME = ENTROPY, TEMPERATURE, AGAIN = "--entropy-coef", "--rollout-temperature", "--recompute-loss-function"
FUSED_CHUNK = 256


class Loss(NamedTuple):
    origin: str
    peak_bytes: float
    saved_bytes: float
    weight_bytes: float = 0


def log_probability_facts(given: Given, launch: object, *, of_slime: bool) -> Iterator[Fact]:
    """Yield the loss of a frontend; nothing if Megatron computes it, or if it is unknown."""
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
