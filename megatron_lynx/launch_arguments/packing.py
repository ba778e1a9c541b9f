"""What slime, and what is made of it, set themselves of Megatron's arguments: their launches leave them out.

    --max-tokens-per-gpu 20480   ──> one packed micro-batch of so many tokens on every context-parallel rank
                                     --seq-length 20480 x context, --micro-batch-size 1
    without a word               ──> --use-distributed-optimizer, and --bf16 unless --fp16

A micro-batch is priced as one sequence of all its tokens, whose attention takes longer than that of several shorter ones. Source:
`set_default_megatron_args` in slime's `megatron_utils/arguments.py`.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_lynx.launch_arguments.given import Given, Value

TOKENS = "--max-tokens-per-gpu"


def packs(given: Given) -> bool:
    """Whether it is that flag which says how many tokens a micro-batch has."""
    return "seq_length" in given.values and given.origin("seq_length").startswith(TOKENS)


def with_packing(given: Given) -> Given:
    """The same launch with what they set. Nothing changes where a launch has no such flag, or says how long its sequences are."""
    tokens = next((words.split()[-1] for words in given.unknown if words.split()[0] == TOKENS), "")
    if not tokens.isdecimal() or given["seq_length"] is not None:
        return given
    values = {
        "seq_length": int(tokens) * (given["context_parallel_size"] or 1),
        "micro_batch_size": 1,
        "use_distributed_optimizer": True,
        "bf16": not given["fp16"],
    }
    said = f"{TOKENS} {tokens}: slime packs so many tokens of each rank into one micro-batch, and sets this"
    added = {
        name: Value(given.table.of_name[name][-1], said, value) for name, value in values.items() if name not in given.values
    }
    return replace(given, values={**given.values, **added})
