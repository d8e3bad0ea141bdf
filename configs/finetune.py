"""Fine-tuning of a base model of any shape: conversations (SFT) or preferences (DPO), of all parameters or by LoRA.

Command:   maxlm prepare --input chats.jsonl --output data/chats --format chat --chat-template chatml \
               --tokenizer runs/base/tokenizer.json --pack-seq-len 256
           maxlm train --config=configs/finetune.py --workdir=runs/chat --config.train.init_from=runs/base \
               --config.data.path=data/chats
Variants:  sft (default) trains all parameters on conversations · lora trains adapters of rank 16 on them · dpo trains
           all parameters on preferences
Hardware:  that of the base; `maxlm plan` with the same options computes the memory
Time:      minutes for the models of docs/tutorials/chat.md on a CPU with 2 cores
Cost:      that of the hardware
Expected:  a lower loss on held-out answers, or a higher accuracy on held-out pairs

The model is that of `train.init_from`, so the config has no shape of its own. The loss of conversations covers the
answers. Adapters need a larger learning rate than all parameters (Hu et al. 2021, "LoRA"). The learning rate of DPO
follows Rafailov et al. 2023.
"""

from ml_collections import ConfigDict

from maxlm.config.loading import default
from maxlm.errors import InputError

# variant → (epochs, peak learning rate)
VARIANTS = {'sft': (3.0, 2e-4), 'lora': (3.0, 5e-4), 'dpo': (1.0, 1e-6)}


def get_config(variant: str = 'sft') -> ConfigDict:
    if variant not in VARIANTS:
        raise InputError(f'configs/finetune.py has no variant {variant!r}; there are: {", ".join(VARIANTS)}')
    config = default()

    config.train.init_model_config = True
    config.train.num_epochs, config.optimizer.learning_rate = VARIANTS[variant]
    config.train.global_batch_size = 8

    config.data.path = 'data/chats'
    config.data.seq_len = 256

    config.eval.interval = 100
    config.eval.num_batches = 16

    config.optimizer.weight_decay = 0.0

    config.checkpoint.save_interval_steps = 100
    config.checkpoint.max_to_keep = 2

    if variant == 'lora':
        config.model.lora_rank = 16
    if variant == 'dpo':
        config.train.objective = 'dpo'
    return config
