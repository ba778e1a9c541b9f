"""What slime, and what is made of it, set themselves of Megatron's arguments: their launches leave them out.

    --max-tokens-per-gpu 20480   ──> one packed micro-batch of so many tokens on every context-parallel rank
                                     --seq-length 20480 x context, --micro-batch-size 1
    without a word               ──> --use-distributed-optimizer, and --bf16 unless --fp16
    allgather, given or not      ──> --moe-token-dispatcher-type alltoall
    --num-steps-per-rollout 4    ──> --global-batch-size: --rollout-batch-size x --n-samples-per-prompt over that

A micro-batch is priced as one sequence of all its tokens, whose attention takes longer than that of several shorter ones. From
`set_default_megatron_args` and `validate_args` in slime's `megatron_utils/arguments.py`; its `utils/arguments.py` for the batch.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_lynx.launch_arguments.given import Given, Value

TOKENS, DYNAMIC = "--max-tokens-per-gpu", "--use-dynamic-batch-size"
STEPS = "--num-steps-per-rollout"
SAMPLES = ("--rollout-batch-size", "--n-samples-per-prompt")


def learns_from_rollouts(given: Given) -> bool:
    """Whether it is reinforcement learning: slime's flags, or Megatron's own."""
    said = {words.split()[0] for words in given.unknown}
    return bool(given["perform_rl_step"]) or not said.isdisjoint((TOKENS, STEPS, *SAMPLES))


def packs(given: Given) -> bool:
    """Whether it is that flag which says how many tokens a micro-batch has."""
    return "seq_length" in given.values and given.origin("seq_length").startswith(TOKENS)


def with_packing(given: Given) -> Given:
    """The same launch with what they set. Nothing changes where a launch has no such flag, or says how long its sequences are."""
    tokens = _number(given, TOKENS)
    if tokens is None or given["seq_length"] is not None:
        return given
    said = f"{TOKENS} {tokens}: slime packs so many tokens of each rank into one micro-batch, and sets this"
    values = {
        "seq_length": (tokens * (given["context_parallel_size"] or 1), said),
        "micro_batch_size": (1, said),
        "use_distributed_optimizer": (True, said),
        "bf16": (not given["fp16"], said),
        **(batch := _batch(given)),
    }
    added = {
        name: Value(given.table.of_name[name][-1], origin, value)
        for name, (value, origin) in values.items()
        if name not in given.values
    }
    if given["moe_token_dispatcher_type"] == "allgather":
        flag = given.table.of_name["moe_token_dispatcher_type"][-1]
        added[flag.sets] = Value(flag, "alltoall, by slime in place of allgather", "alltoall")
    read = {TOKENS, DYNAMIC, *((STEPS, *SAMPLES) if batch and "global_batch_size" in added else ())}
    unknown = tuple(words for words in given.unknown if words.split()[0] not in read)
    return replace(given, values={**given.values, **added}, unknown=unknown)


def _batch(given: Given) -> dict[str, tuple[int, str]]:
    """The batch of a step, where a launch says how many steps there are of the samples of one rollout."""
    steps, *samples = (_number(given, option) for option in (STEPS, *SAMPLES))
    if not steps or None in samples:
        return {}
    prompts, of_each = (count or 0 for count in samples)
    said = f"{STEPS} {steps}: of {prompts} x {of_each} samples"
    return {"global_batch_size": (prompts * of_each // steps, said)}


def _number(given: Given, option: str) -> int | None:
    """What a launch says behind a flag that Megatron does not know; None where that is no number."""
    word = given.unknown_value(option) or ""
    return int(word) if word.isdecimal() else None
