"""Draft the table of one megatron-core release: `python scripts/record_release.py` prints it for the one that is importable.

`PYTHONPATH=CHECKOUT python scripts/record_release.py` drafts that of a checkout, or of an unpacked wheel.

The draft holds fingerprints only. Before it is committed somebody reads what changed since the last table (`git diff` of the two
releases, for the functions named) and runs the tests against it.
"""

from __future__ import annotations

from megatron_lynx.apply.releases import installed_version
from megatron_lynx.apply.releases.release import fingerprint
from megatron_lynx.testbed.missing_modules import stand_in_for_missing_modules

CORE = "megatron.core"
RELIED_ON = (
    f"{CORE}.transformer.transformer_layer:TransformerLayer.forward",
    f"{CORE}.transformer.transformer_layer:TransformerLayer._forward_attention",
    f"{CORE}.transformer.transformer_layer:TransformerLayer._forward_mlp",
    f"{CORE}.transformer.transformer_layer:TransformerLayer._forward_post_mlp",
    f"{CORE}.transformer.transformer_block:TransformerBlock.forward",
    f"{CORE}.transformer.attention:Attention.forward",
    f"{CORE}.transformer.attention:SelfAttention.get_query_key_value_tensors",
    f"{CORE}.transformer.mlp:MLP.forward",
    f"{CORE}.transformer.dot_product_attention:DotProductAttention.forward",
    f"{CORE}.fusions.fused_bias_dropout:_bias_dropout_add_func",
    f"{CORE}.tensor_parallel.layers:ColumnParallelLinear.forward",
    f"{CORE}.tensor_parallel.layers:RowParallelLinear.forward",
    f"{CORE}.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication.forward",
    f"{CORE}.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication.backward",
    f"{CORE}.tensor_parallel.mappings:_reduce",
    f"{CORE}.tensor_parallel.mappings:_gather_along_first_dim",
    f"{CORE}.tensor_parallel.mappings:_reduce_scatter_along_first_dim",
    f"{CORE}.tensor_parallel.random:CudaRNGStatesTracker",
    f"{CORE}.pipeline_parallel.schedules:forward_step",
    f"{CORE}.pipeline_parallel.schedules:backward_step",
    f"{CORE}.pipeline_parallel.schedules:deallocate_output_tensor",
    f"{CORE}.pipeline_parallel.schedules:custom_backward",
    f"{CORE}.pipeline_parallel.schedules:forward_backward_no_pipelining",
    f"{CORE}.pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving",
    f"{CORE}.pipeline_parallel.schedules:get_pp_rank_microbatches",
    f"{CORE}.pipeline_parallel.schedules:get_schedule_table",
    f"{CORE}.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving",
    f"{CORE}.pipeline_parallel.p2p_communication:_p2p_ops",
    f"{CORE}.pipeline_parallel.p2p_communication:_batched_p2p_ops",
    f"{CORE}.pipeline_parallel.p2p_communication:P2PCommunicator._communicate",
)


def draft() -> str:
    """The table as a Python module. A function that this release lacks is left out, with a comment that says so."""
    minor = ".".join(installed_version().split(".")[:2])
    name = f"CORE_{minor.replace('.', '_')}"
    lines = [f'"""megatron-core {minor}, recorded from {installed_version()}."""', ""]
    lines += ["from megatron_lynx.apply.releases.release import Release", "", f"{name} = Release(", f'    version="{minor}",']
    lines.append("    fingerprints={")
    for function in RELIED_ON:
        try:
            lines.append(f'        "{function}": "{fingerprint(function)}",')
        except (ImportError, AttributeError):
            lines.append(f"        # {function}: not in this release")
    return "\n".join([*lines, "    },", ")", ""])


if __name__ == "__main__":
    stand_in_for_missing_modules()  # where there is no GPU
    print(draft(), end="")
