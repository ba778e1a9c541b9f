"""Which flags another layout changes."""

from __future__ import annotations

import shlex

from megatron_lynx.advise.flags import changes, command
from megatron_lynx.launch_arguments import read_launch
from megatron_lynx.launch_arguments.reading import job_of
from tests.uniform import uniform_plan

PACKED = (
    "train.py --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --vocab-size 50257 --max-tokens-per-gpu 4096 --lr 1e-4 "
    "--use-dynamic-batch-size --context-parallel-size 2 --global-batch-size 64 --attention-backend flash "
    "--attention-dropout 0 --transformer-impl transformer_engine"
)


def test_tokens_that_slime_packs_are_said_as_slime_says_them() -> None:
    """What is printed is read as the layout that was looked at."""
    reading = read_launch(shlex.split(PACKED), gpus=8, planning=True)
    before = job_of(reading, "h100-80g")
    for context, micro, tokens in ((2, 2, 8192), (4, 1, 2048), (1, 1, 8192), (4, 2, None)):
        batch = before.batch.model_copy(update={"micro": micro})
        after = before.model_copy(update={"batch": batch, "parallel": before.parallel.model_copy(update={"context": context})})
        found = dict(changes(before, after, uniform_plan(after), reading))
        assert "--micro-batch-size" not in found
        assert found.get("--max-tokens-per-gpu") == (None if tokens is None else (str(tokens),))
        words = command(reading, before, after, uniform_plan(after), "plan.yaml").split()
        again = job_of(read_launch(words[words.index("train.py") :], gpus=8, planning=True), "h100-80g")
        assert again.batch.micro * again.model.seq == micro * before.model.seq
        assert again.parallel.context == context
