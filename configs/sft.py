"""Instruction tuning (SFT) of a base model of any shape on packed conversations.

Command:   maxlm prepare --input chats.jsonl --output data/chats --format chat --chat-template chatml \
               --tokenizer runs/base/tokenizer.json --pack-seq-len 256
           maxlm train --config=configs/sft.py --workdir=runs/chat --config.train.init_from=runs/base \
               --config.data.path=data/chats
Variants:  full (default) trains all parameters · lora trains adapters of rank 16
Hardware:  that of the base; `maxlm plan` with the same options computes the memory
Time:      docs/tutorials/chat.md has measured examples
Cost:      that of the hardware
Expected:  a lower loss on the answers of held-out conversations

The model is that of `train.init_from`, so the config has no shape of its own. The loss covers the answers. The learning
rate of adapters is larger than that of all parameters, as in Hu et al. 2021, "LoRA".
"""

from ml_collections import ConfigDict

from maxlm.config.loading import default
from maxlm.errors import InputError

VARIANTS = ('full', 'lora')


def get_config(variant: str = 'full') -> ConfigDict:
    if variant not in VARIANTS:
        raise InputError(f'configs/sft.py has no variant {variant!r}; there are: {", ".join(VARIANTS)}')
    config = default()

    config.train.init_model_config = True
    config.train.num_epochs = 3.0
    config.train.global_batch_size = 8
    config.train.log_every = 10

    config.data.path = 'data/chats'
    config.data.seq_len = 256

    config.eval.interval = 100
    config.eval.num_batches = 16

    config.optimizer.learning_rate = 2e-4
    config.optimizer.min_learning_rate = 0.0
    config.optimizer.warmup_steps = 10
    config.optimizer.weight_decay = 0.0

    config.checkpoint.save_interval_steps = 100
    config.checkpoint.max_to_keep = 2

    if variant == 'lora':
        config.model.lora_rank = 16
        config.optimizer.learning_rate = 5e-4
    return config
