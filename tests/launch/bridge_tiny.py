"""A training script as people write them for Megatron-Bridge: a configuration, and `pretrain`. Knows nothing of plans.

Words: `PART.FIELD=VALUE` of the configuration, as in `model.sequence_parallel=True`; `local` for Megatron's own layers, `cut`
for a core attention that stands in for Transformer Engine's among context-parallel ranks, `hybrid` for a hybrid stack of the
usual layers, `mamba` for one that has Mamba layers, too; `changing` for micro-batches of other lengths, `packed` for packed
ones; `lora`, `dora`; `graphs` for captured graphs that run again on the memory of their capture. What every rank saw of each
step goes into the folder SAID_IN, as NAME: losses, the norm of gradients and, at the end, weights; and the configuration, as
NAME_cfg.yaml.
"""

import ast
import itertools
import os
import sys
from contextlib import nullcontext, suppress
from pathlib import Path

if "UNDER" in os.environ:  # not started by the testbed's launcher, which answers for what a GPU machine has
    from tests.instruments.script_device import stand_in_for_gpu_machine

    stand_in_for_gpu_machine()

import torch
import torch.nn.functional as F
from megatron.bridge.models.gpt_provider import GPTModelProvider, default_layer_spec, local_layer_spec
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    LoggerConfig,
    MockGPTDatasetConfig,
    OptimizerConfig,
    RNGConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.core.models import backends
from megatron.core.transformer.enums import AttnBackend

from tests.instruments import graphs
from tests.instruments.context_attention import ContextAttention, TeContextAttention


def container(words: list[str]) -> ConfigContainer:
    local = "local" in words
    bf16 = not local
    dtype = torch.bfloat16 if bf16 else torch.float32
    layers = {
        "transformer_layer_spec": local_layer_spec if local else default_layer_spec,
        "transformer_impl": "local" if local else "transformer_engine",
        "num_layers": 4,
    }
    provider = GPTModelProvider
    if "hybrid" in words or "mamba" in words:
        try:
            from megatron.bridge.models.hybrid.hybrid_provider import HybridModelProvider as provider
        except ImportError:  # 0.5
            from megatron.bridge.models.mamba.mamba_provider import MambaModelProvider as provider
        layers = {"hybrid_layer_pattern": "*-*-*-*-", "attention_backend": AttnBackend.auto}
    if "mamba" in words:
        layers |= {"hybrid_layer_pattern": "M-*-M-*-", "mamba_num_heads": 4, "mamba_head_dim": 16, "mamba_state_dim": 16}
        layers |= {"mamba_num_groups": 2, "is_hybrid_model": True}
    model = provider(
        **layers,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        num_query_groups=2,
        seq_length=64,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        position_embedding_type="rope",
        add_bias_linear=False,
        attention_dropout=0.1,
        hidden_dropout=0.1,
        share_embeddings_and_output_weights=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        cross_entropy_loss_fusion=False,
        gradient_accumulation_fusion=False,
        bf16=bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        make_vocab_size_divisible_by=128,
    )
    return ConfigContainer(
        model=model,
        train=TrainingConfig(train_iters=4, global_batch_size=4, micro_batch_size=1),
        validation=ValidationConfig(eval_interval=100, eval_iters=0),
        optimizer=OptimizerConfig(optimizer="adam", bf16=bf16, use_distributed_optimizer=True, lr=3e-3, min_lr=1e-6),
        scheduler=SchedulerConfig(
            lr_decay_style="cosine",
            lr_warmup_iters=1,
            lr_decay_iters=10,
            start_weight_decay=0.01,
            end_weight_decay=0.01,
            weight_decay_incr_style="constant",
        ),
        ddp=DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=True, overlap_param_gather=True
        ),
        dataset=MockGPTDatasetConfig(
            random_seed=1234,
            reset_attention_mask=False,
            reset_position_ids=False,
            eod_mask_loss=False,
            seq_length=64,
            num_dataset_builder_threads=1,
            data_sharding=True,
            dataloader_type="single",
            num_workers=0,
            path_to_cache=os.environ["SAID_IN"],
        ),
        logger=LoggerConfig(log_interval=1),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=511),
        checkpoint=CheckpointConfig(save=None),
        rng=RNGConfig(seed=1234),
        dist=DistributedInitConfig(distributed_backend="gloo"),
    )


def changing(state, data_iterator, model, return_schedule_plan=False):
    """`forward_step` where micro-batches have 32, 128, 64 and 16 tokens in turn."""
    lengths = ((32,), (128,), (64,), (16,))[next(CALLS) % 4]
    return forward_step(state, of_length(data_iterator, sum(lengths)), model, return_schedule_plan)


def packed(state, data_iterator, model, return_schedule_plan=False):
    """`forward_step` of sequences as Bridge's packed data sets give them: where each ends, filled up by -1. Cut among ranks, of
    lengths that two can share."""
    second = (8, 28, 8, 20) if "cut" in sys.argv else (5, 30, 9, 20)
    lengths = ((20, 44), second, (64,), (12, 20))[next(CALLS) % 4]

    def with_ends():
        for batch in of_length(data_iterator, sum(lengths)):
            ends = [0, *itertools.accumulate(lengths)]
            positions = torch.cat([torch.arange(length) for length in lengths])
            yield {
                **batch,
                "attention_mask": None,
                "position_ids": positions[None],
                "cu_seqlens": torch.tensor([[*ends, -1, -1]], dtype=torch.int32),
                "cu_seqlens_argmin": torch.tensor([len(ends)]),
                "max_seqlen": torch.tensor([max(lengths)], dtype=torch.int32),
            }

    return forward_step(state, with_ends(), model, return_schedule_plan)


def of_length(data_iterator, length):
    while True:
        batch = next(data_iterator)
        longer = {name: value if value is None else torch.cat([value, value], -1)[..., :length] for name, value in batch.items()}
        longer["position_ids"] = torch.arange(length)[None]
        yield longer


CALLS = itertools.count()
STEPS = {"changing": changing, "packed": packed}


class Seen(Callback):
    """Every step's losses and norm, and the weights behind the last one that was taken."""

    def __init__(self):
        self.steps = []

    def on_train_step_end(self, context):
        losses = {name: loss.detach().clone() for name, loss in context.loss_dict.items()}
        self.steps.append((losses, context.grad_norm))
        weights = [parameter.detach().clone() for chunk in context.model for parameter in chunk.parameters()]
        path = Path(os.environ["SAID_IN"]) / f"{os.environ['NAME']}_{os.environ['RANK']}.pt"
        torch.save({"steps": self.steps, "weights": weights}, path)


def attends_among_ranks():
    """Megatron's own core attention refuses to run among several context-parallel ranks, and Transformer Engine's needs a GPU."""
    from megatron.core.extensions import transformer_engine_spec_provider

    backends.DotProductAttention = ContextAttention
    transformer_engine_spec_provider.TEDotProductAttention = TeContextAttention


def main():
    words = sys.argv[1:]
    cfg = container(words)
    if "cut" in words:
        attends_among_ranks()
    for word, adapters in (("lora", LoRA), ("dora", DoRA)):
        if word in words:
            cfg.peft = adapters(dim=8, alpha=16)
    for word in words:
        place, found, value = word.partition("=")
        if found:
            part, field = place.split(".")
            with suppress(ValueError):  # a word
                value = ast.literal_eval(value)
            setattr(getattr(cfg, part), field, value)
    if os.environ["RANK"] == "0":
        cfg.to_yaml(str(Path(os.environ["SAID_IN"]) / f"{os.environ['NAME']}_cfg.yaml"))
    step = next((STEPS[word] for word in words if word in STEPS), forward_step)
    with graphs.stand_in_for_captures() if "graphs" in words else nullcontext(), under(os.environ.get("UNDER")):
        pretrain(cfg, step, callbacks=[Seen()])


def under(plan):
    if plan is None:
        return nullcontext()
    from megatron_lynx.bridge import training_under

    return training_under(plan, check=2, trace=os.environ.get("TRACE"))


if __name__ == "__main__":
    main()
