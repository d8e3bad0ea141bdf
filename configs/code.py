"""Code models with the shapes of Llama and Code Llama, 6.7B to 69B parameters: pretraining, long context, instructions.

Command:   python -m maxlm.train --config=configs/code.py:7b --workdir=runs/code-7b
Variants:  7b · 13b · 30b · 70b pretrain 6.7, 13.0, 32.5 and 69.0 billion parameters with sequences of 4096 tokens;
           7b-32gb is 7b for devices with 32 GB, such as TPU v4;
           7b-long continues runs/code-7b with sequences of 8192, then 16 384 tokens;
           7b-instruct fine-tunes runs/code-7b-long on conversations; 7b-lora does so with LoRA adapters of rank 16
Data:      python -m maxlm.prepare --input CODE… --output data --tokenizer bpe:32016
           7b-instruct and 7b-lora: python -m maxlm.prepare --format chat --input CHATS.jsonl --output data/chat
           --tokenizer runs/code-7b-long/tokenizer.json --chat-template chatml --pack-seq-len 4096
Hardware:  H100 80 GB: at least 8 for 7b, 16 for 13b, 32 for 30b, 64 for 70b, 1 for 7b-lora; or a TPU pod slice with
           the same memory
Time:      200 billion tokens, 4.2M per step; --config.train.num_tokens=N sets another length. 7b-long: 21 billion
           tokens, 2.1M per step; 7b-instruct and 7b-lora: 2 epochs, 262k tokens per step
Memory:    compiled ahead of time, GiB per H100: 7b 62 and 7b-32gb 18 on 8, 13b 22 on 16, 30b 29 on 32, 70b 33 on 128 in
           two replicas; 7b-long 25 on 8, 7b-instruct 20 on 8, 7b-lora 31 on one
Expected:  speed and loss are not measured yet

Shapes and learning rates follow Touvron et al. 2023, "LLaMA" and "Llama 2". Long context follows Rozière et al. 2023,
"Code Llama": rotary base 10⁶, 10 000 steps of 2M tokens at 2e-5. Instruction tuning follows "Llama 2": batches of 64
sequences of 4096 tokens, 2 epochs, 2e-5. Adapter rank and learning rate follow Dettmers et al. 2023, "QLoRA".
"""

from ml_collections import ConfigDict

from maxlm.config.loading import default
from maxlm.errors import InputError

# variant → (layers, width, heads, key/value heads, feed-forward width, peak learning rate)
SHAPES = {
    '7b': (32, 4096, 32, 32, 11_008, 3e-4),
    '13b': (40, 5120, 40, 40, 13_824, 3e-4),
    '30b': (60, 6656, 52, 52, 17_920, 1.5e-4),
    '70b': (80, 8192, 64, 8, 28_672, 1.5e-4),
}
# Phases after pretraining, which need the memory-saving settings.
PHASES = ('long', 'instruct', 'lora')


def get_config(variant: str = '7b') -> ConfigDict:
    shape, _, phase = variant.partition('-')
    variants = [*SHAPES, '7b-32gb', *(f'7b-{name}' for name in PHASES)]
    if variant not in variants:
        raise InputError(f'configs/code.py has no variant {variant!r}; there are: {", ".join(variants)}')
    config = pretraining(*SHAPES[shape])
    if variant == '7b':
        use_80_gb(config)
    if phase in PHASES:
        continue_at_long_context(config)
    if phase in ('instruct', 'lora'):
        follow_instructions(config)
    if phase == 'lora':
        with_adapters(config)
    return config


def pretraining(
    num_layers: int, dim: int, num_heads: int, num_kv_heads: int, ffn_dim: int, learning_rate: float
) -> ConfigDict:
    config = default()

    config.model.family = 'llama'
    # The 32 000 token ids of Llama and 16 ids for special tokens such as those of infilling.
    config.model.vocab_size = 32_016
    config.model.num_layers = num_layers
    config.model.dim = dim
    config.model.num_heads = num_heads
    config.model.num_kv_heads = num_kv_heads
    config.model.ffn_dim = ffn_dim
    config.model.remat_policy = 'full'

    config.data.seq_len = 4096

    config.train.num_tokens = 200_000_000_000
    config.train.global_batch_size = 1024
    config.train.per_device_batch_size = 1

    config.eval.interval = 500
    config.eval.num_batches = 1
    config.eval.num_samples = 4

    config.optimizer.learning_rate = learning_rate
    config.optimizer.min_learning_rate = learning_rate / 10
    config.optimizer.warmup_steps = 2000
    config.optimizer.max_grad_norm = 1.0

    config.checkpoint.save_interval_steps = 250
    config.checkpoint.max_to_keep = 5

    # As in the published setup, each rollback halves the learning rates.
    config.guard.rollback_lr_factor = 0.5
    return config


def use_80_gb(config: ConfigDict) -> None:
    """Sets the fastest compiled step for 8 × H100: 50 % MFU by plan; 43 % with ZeRO-3 and a loop over the layers."""
    config.model.remat_policy = 'dots_no_batch'
    config.model.scan_layers = False
    config.train.per_device_batch_size = 2
    config.mesh.zero_stage = 2


def continue_at_long_context(config: ConfigDict) -> None:
    """Continues training with 16 384-token sequences (8192 for the first 30 %) and a larger rotary base."""
    config.model.rope_theta = 1e6
    config.model.max_positions = 16_384

    config.data.seq_len = 16_384
    config.data.seq_len_schedule = ((8192, 0.3),)

    config.train.init_from = 'runs/code-7b'
    config.train.num_tokens = 10_000 * 128 * 16_384
    config.train.global_batch_size = 128

    config.optimizer.learning_rate = 2e-5
    config.optimizer.min_learning_rate = 2e-6
    config.optimizer.warmup_steps = 100


def follow_instructions(config: ConfigDict) -> None:
    """Fine-tunes on packed conversations; the loss covers the assistant tokens that the data marks as targets."""
    # Leaves ids for the tokens of a chat template; their embeddings start at the mean of the existing ones.
    config.model.vocab_size = 32_032

    config.data.path = 'data/chat'
    config.data.seq_len = 4096
    config.data.seq_len_schedule = ()

    config.train.init_from = 'runs/code-7b-long'
    config.train.num_tokens = 0
    config.train.num_epochs = 2.0
    config.train.global_batch_size = 64

    config.eval.interval = 100
    config.eval.num_batches = 0

    config.optimizer.min_learning_rate = 0.0
    config.optimizer.warmup_steps = 20


def with_adapters(config: ConfigDict) -> None:
    """Trains LoRA adapters on all block projections, and the embedding and head, which contain the new tokens."""
    config.model.lora_rank = 16
    config.model.lora_alpha = 16.0

    config.optimizer.learning_rate = 2e-4
    config.optimizer.trainable_params = ('embedding', 'head')
    config.optimizer.weight_decay = 0.0
