"""Stock's `mla_up_proj`: what it lets go of and runs again, and of whom it is asked."""

from __future__ import annotations

from megatron_lynx.kinds.planning import half_tensors
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.stock.layer import layer_bytes
from megatron_lynx.stock.legality import Facts, objections
from megatron_lynx.stock.setting import StockSetting
from tests.tiny_jobs import tiny_job

SIZES = {"q_rank": 12, "kv_rank": 8, "head_size": 8, "rope_size": 4, "value_head_size": 6}
UP = StockSetting(recompute=("mla_up_proj",))


def test_heads_are_made_again_of_what_was_compressed() -> None:
    """The norms inside the up-projections, too: they are in the same checkpoint."""
    job = tiny_job("gpt", latent=SIZES, qk_norm=True)
    shape = LayerShape.of(job)
    attention, mlp = layer_bytes(shape, UP)
    inside = {"q_layernorm", "linear_q_up_proj", "kv_layernorm", "linear_kv_up_proj", "rotary"}
    made = sum(tensor.bytes for tensor in half_tensors(shape, "attention") if tensor.made_by in inside and tensor.saved_by)
    assert attention.again == made > 0
    whole, same = layer_bytes(shape, StockSetting())
    assert (attention.stays + made, mlp) == (whole.stays, same)


def test_it_is_for_latent_attention_alone() -> None:
    usual = tiny_job("gpt")
    assert not [*objections(UP, Facts.of(tiny_job("gpt", latent=SIZES)), "config")]
    assert [*objections(UP, Facts.of(usual), "config")] == ["mla_up_proj is recomputed with --multi-latent-attention alone"]
    assert layer_bytes(LayerShape.of(usual), UP) == layer_bytes(LayerShape.of(usual), StockSetting())
