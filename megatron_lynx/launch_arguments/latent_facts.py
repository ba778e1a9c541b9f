"""The latent attention of a launch (--multi-latent-attention), and what of it a plan cannot have.

--q-lora-rank 1536                             ──> model.latent.q_rank              left out: queries are not compressed
--kv-lora-rank 512                             ──> model.latent.kv_rank
--qk-head-dim 128 --qk-pos-emb-head-dim 64     ──> model.latent.head_size, rope_size
--v-head-dim 128                               ──> model.latent.value_head_size
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.errors import Problem
from megatron_lynx.launch_arguments.fact import Fact
from megatron_lynx.launch_arguments.given import Given

LATENT = "multi_latent_attention"
SIZES = {
    "kv_rank": "kv_lora_rank",
    "head_size": "qk_head_dim",
    "rope_size": "qk_pos_emb_head_dim",
    "value_head_size": "v_head_dim",
}
BESIDE = {
    "group_query_attention": "no --group-query-attention: latent attention has keys for every head",
    "tp_comm_overlap": "no --tp-comm-overlap: userbuffers are not shown with latent attention",
}


def latent_facts(given: Given, problems: list[Problem], *, planning: bool) -> Iterator[Fact]:
    """Nothing without latent attention. What it cannot have beside it is added to `problems`.

    `planning`: for a plan, under which rotary parts may not be turned in place.
    """
    if not given[LATENT]:
        return
    if given["q_lora_rank"] is not None:
        yield Fact("model.latent.q_rank", given["q_lora_rank"], given.origin("q_lora_rank"))
    for name, flag in SIZES.items():
        yield Fact(f"model.latent.{name}", given[flag], given.origin(flag))
    for flag, needed in BESIDE.items():
        if given[flag]:
            problems.append(Problem(given.origin(flag), str(given[flag]), needed))
    if planning and given["apply_rope_fusion"]:
        todo = "the fused kernel overwrites what a linear returned, which a replay may need"
        problems.append(Problem("--no-rope-fusion", "not given", "given, with --multi-latent-attention under a plan", todo))
