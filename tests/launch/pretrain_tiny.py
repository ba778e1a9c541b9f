"""A training script as people write them: Megatron's loop and arguments, a dataset of its own. Knows nothing of plans.

For `megatron.training` of 0.19, which wheels of megatron-core bring.
"""

import torch
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args


class Texts(torch.utils.data.Dataset):
    """As many sequences as are asked for; each follows from its number alone."""

    def __init__(self, length, args):
        self._length, self._seq, self._vocab = length, args.seq_length, args.vocab_size

    def __len__(self):
        return self._length

    def __getitem__(self, number):
        text = torch.randint(self._vocab, (self._seq + 1,), generator=torch.Generator().manual_seed(number))
        return {"tokens": text[:-1], "labels": text[1:], "position_ids": torch.arange(self._seq)}


def datasets(num_samples, vp_stage=None):
    return tuple(Texts(max(number or 0, 1), get_args()) for number in num_samples)


def mean_of(losses):
    return (
        losses.float().mean(),
        torch.tensor(1),
        {"lm loss": torch.stack([losses.detach().float().sum(), torch.tensor(losses.numel())])},
    )


def forward_step(batches, model):
    batch = next(batches)
    return model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]), mean_of


if __name__ == "__main__":
    datasets.is_distributed = True  # on every rank, instead of a broadcast
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)
