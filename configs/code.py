"""Code models with the shapes of Llama and Code Llama, 6.7B to 69B parameters: pretraining, long context, instructions.

Command:   maxlm recipe --config=configs/code.py:7b code=CODE chats=CHATS.jsonl prompts=TASKS.jsonl
           prepares CODE with fill-in-the-middle, filters and deduplication, and trains four phases, each from the last
           one: runs/code-7b, runs/code-7b-long, runs/code-7b-instruct and runs/code-7b-rl, whose model is exported
Variants:  7b · 13b · 30b · 70b pretrain 6.7, 13.0, 32.5 and 69.0 billion parameters with sequences of 4096 tokens;
           7b-32gb is 7b for devices with 32 GB, such as TPU v4;
           7b-long continues runs/code-7b with sequences of 8192, then 16 384 tokens;
           7b-instruct fine-tunes runs/code-7b-long on conversations; 7b-lora does so with LoRA adapters of rank 16,
           and 7b-qlora with adapters beside kernels in 4 bits;
           7b-rl trains runs/code-7b-instruct with GRPO on programming tasks: a response is rewarded if its program can
           be parsed and passes the tests of the task;
           7b-reward trains a reward model of human preferences from runs/code-7b-instruct, and 7b-human trains
           runs/code-7b-rl with GRPO on its scores;
           7b-feedback trains runs/code-7b-rl with GRPO in an environment: the tests answer the first program, and the
           model may correct it once;
           smoke and smoke-long, -instruct, -rl, -reward, -human and -feedback: the same phases with two narrow layers,
           on a CPU
Afterward: maxlm recipe --config=configs/code.py:7b-preferences pairs=PAIRS.jsonl questions=QUESTIONS.jsonl
           prepares PAIRS and trains 7b-reward and 7b-human; the final model is in runs/code-7b-human
           maxlm recipe --config=configs/code.py:7b-corrections prompts=TASKS.jsonl
           trains 7b-feedback; the final model is in runs/code-7b-feedback
Data:      CHATS.jsonl has conversations, TASKS.jsonl has prompts with `tests`, PAIRS.jsonl has preferred and rejected
           answers, QUESTIONS.jsonl has prompts (docs/posttraining.md)
Hardware:  H100 80 GB: at least 8 for 7b, 16 for 13b, 32 for 30b, 64 for 70b, 1 for 7b-lora and 7b-qlora; or a TPU pod
           slice with the same memory
Time:      200 billion tokens, 4.2M per step; --config.train.num_tokens=N sets another length. 7b-long: 21 billion
           tokens, 2.1M per step; 7b-instruct, 7b-lora and 7b-qlora: 2 epochs, 262k tokens per step; 7b-rl: 200 steps
           of 1024 responses to 64 prompts
Memory:    compiled ahead of time, GiB per H100: 7b 62 and 7b-32gb 18 on 8, 13b 55 on 16, 30b 38 on 32, 70b 50 on 64;
           7b-long 25 on 8, 7b-instruct 20 on 8, 7b-lora 43 and 7b-qlora 10 on one
Expected:  speed and loss are not measured yet

Shapes and learning rates follow Touvron et al. 2023, "LLaMA" and "Llama 2". Long context follows Rozière et al. 2023,
"Code Llama": rotary base 10⁶, 10 000 steps of 2M tokens at 2e-5. Instruction tuning follows "Llama 2": batches of 64
sequences of 4096 tokens, 2 epochs, 2e-5. Adapter rank and learning rate follow Dettmers et al. 2023, "QLoRA". Group
size, batch and learning rate of GRPO follow Shao et al. 2024, "DeepSeekMath". A rollback halves the learning rate, and
models above 30 billion parameters have 8-bit moments, as in the published set-up.
"""

from ml_collections import ConfigDict

from maxlm.config.loading import default
from maxlm.config.smoke import shrink, shrink_rollouts
from maxlm.errors import InputError

# variant → (layers, width, heads, key/value heads, feed-forward width, peak learning rate)
SHAPES = {
    '7b': (32, 4096, 32, 32, 11_008, 3e-4),
    '13b': (40, 5120, 40, 40, 13_824, 3e-4),
    '30b': (60, 6656, 52, 52, 17_920, 1.5e-4),
    '70b': (80, 8192, 64, 8, 28_672, 1.5e-4),
}
# Phases after pretraining, which need the memory-saving settings.
PHASES = ('long', 'instruct', 'lora', 'qlora', 'rl', 'reward', 'human', 'feedback')
# Phases with GRPO.
REINFORCED = ('rl', 'human', 'feedback')


def get_phases(variant: str = '7b') -> list[str]:
    if variant in ('7b-preferences', 'smoke-preferences'):
        return preference_phases(variant.partition('-')[0])
    if variant in ('7b-corrections', 'smoke-corrections'):
        shape = variant.partition('-')[0]
        return [f'grpo --config={{config}}:{shape}-feedback --config.grpo.prompts={{prompts}}']
    if variant not in (*SHAPES, '7b-32gb', 'smoke'):
        raise InputError(f'configs/code.py:{variant} has no phases; use --config=configs/code.py:7b')
    is_smoke = variant == 'smoke'
    size = 400 if is_smoke else 32_016
    pretrain = [
        f'prepare --input {{code}} --output data/code-{variant.partition("-")[0]} --tokenizer {{tokenizer:bpe:{size}}} '
        '--fim-rate 0.5 --filter code --deduplicate near',
        f'train --config={{config}}:{variant}',
    ]
    if variant not in ('7b', 'smoke'):
        return pretrain
    return [
        *pretrain,
        f'train --config={{config}}:{variant}-long',
        f'prepare --format chat --input {{chats}} --output data/code-{variant}-chat --chat-template chatml '
        f'--tokenizer runs/code-{variant}-long/tokenizer.json --pack-seq-len {128 if is_smoke else 4096}',
        f'train --config={{config}}:{variant}-instruct',
        f'grpo --config={{config}}:{variant}-rl --config.grpo.prompts={{prompts}}',
    ]


def preference_phases(shape: str) -> list[str]:
    length = 128 if shape == 'smoke' else 4096
    return [
        f'prepare --format preference --input {{pairs}} --output data/code-{shape}-pairs --chat-template chatml '
        f'--tokenizer runs/code-{shape}-instruct/tokenizer.json --pack-seq-len {length}',
        f'train --config={{config}}:{shape}-reward',
        f'grpo --config={{config}}:{shape}-human --config.grpo.prompts={{questions}}',
    ]


def get_config(variant: str = '7b') -> ConfigDict:
    shape, _, phase = variant.partition('-')
    variants = [*SHAPES, '7b-32gb', *(f'7b-{name}' for name in PHASES), 'smoke', *(f'smoke-{name}' for name in PHASES)]
    if variant not in variants:
        raise InputError(f'configs/code.py has no variant {variant!r}; there are: {", ".join(variants)}')
    config = pretraining(*SHAPES['7b' if shape == 'smoke' else shape])
    config.data.path = f'data/code-{shape}'
    if variant in SETTINGS_80_GB:
        SETTINGS_80_GB[variant](config)
    if phase in PHASES:
        continue_at_long_context(config, shape)
    if phase in ('instruct', 'lora', 'qlora', *REINFORCED, 'reward'):
        follow_instructions(config, shape)
    if phase in ('lora', 'qlora'):
        with_adapters(config)
    if phase == 'qlora':
        config.model.weight_quantization = 'int4'
    if phase == 'reward':
        learn_preferences(config, shape)
    if phase in REINFORCED:
        learn_from_tests(config, shape)
    if phase == 'human':
        follow_preferences(config, shape)
    if phase == 'feedback':
        learn_from_feedback(config, shape)
    if shape == 'smoke':
        shrink(config)
        if phase in REINFORCED:
            shrink_rollouts(config)
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
    config.optimizer.moment_dtype = 'int8' if num_layers >= SHAPES['30b'][0] else 'float32'
    config.optimizer.max_grad_norm = 1.0

    config.checkpoint.save_interval_steps = 250
    config.checkpoint.max_to_keep = 5

    # As in the published setup, each rollback halves the learning rates.
    config.guard.rollback_lr_factor = 0.5
    return config


def use_80_gb(config: ConfigDict) -> None:
    """Sets the fastest compiled step of 7b and 13b: 50 % and 46 % MFU by plan.

    With a loop over the layers that recomputes them, 7b would reach 41 % and 13b 33 %.
    """
    config.model.remat_policy = 'dots_no_batch'
    config.model.scan_layers = False
    config.train.per_device_batch_size = 2


def gather_once(config: ConfigDict) -> None:
    """Gathers the parameters of 7b once per step; 8 GPUs have memory for a copy of all parameters."""
    use_80_gb(config)
    config.mesh.zero_stage = 2


def recompute_layers(config: ConfigDict) -> None:
    """Sets the fastest compiled step of 30b and 70b: 43 % MFU by plan, 33 % with micro-batches of 1."""
    config.train.per_device_batch_size = 4


# Variants with settings for devices with 80 GB.
SETTINGS_80_GB = {'7b': gather_once, '13b': use_80_gb, '30b': recompute_layers, '70b': recompute_layers}


def continue_at_long_context(config: ConfigDict, shape: str) -> None:
    """Continues training with 16 384-token sequences (8192 for the first 30 %) and a larger rotary base."""
    config.model.rope_theta = 1e6
    config.model.max_positions = 16_384

    config.data.seq_len = 16_384
    config.data.seq_len_schedule = ((8192, 0.3),)

    config.train.init_from = f'runs/code-{shape}'
    config.train.num_tokens = 10_000 * 128 * 16_384
    config.train.global_batch_size = 128

    config.optimizer.learning_rate = 2e-5
    config.optimizer.min_learning_rate = 2e-6
    config.optimizer.warmup_steps = 100


def follow_instructions(config: ConfigDict, shape: str) -> None:
    """Fine-tunes on packed conversations; the loss covers the assistant tokens that the data marks as targets."""
    # Leaves ids for the tokens of a chat template; their embeddings start at the mean of the existing ones.
    config.model.vocab_size = 32_032

    config.data.path = f'data/code-{shape}-chat'
    config.data.seq_len = 4096
    config.data.seq_len_schedule = ()

    config.train.init_from = f'runs/code-{shape}-long'
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


def learn_from_tests(config: ConfigDict, shape: str) -> None:
    """Reinforces responses whose programs pass the tests of their task."""
    config.train.objective = 'grpo'
    config.train.init_from = f'runs/code-{shape}-instruct'
    config.train.num_epochs = 0.0
    config.train.num_steps = 200
    config.train.global_batch_size = 1024
    config.train.per_device_batch_size = 4
    config.data.seq_len = 2048

    config.grpo.prompts = 'data/tasks.jsonl'
    config.grpo.reward = 'all_tests + 0.1*syntax'
    config.grpo.num_generations = 16
    config.grpo.prompts_per_rollout = 64
    config.grpo.max_completion_length = 1024

    config.eval.interval = 0

    config.optimizer.learning_rate = 1e-6
    config.optimizer.schedule = 'constant'
    config.optimizer.warmup_steps = 10
    config.optimizer.weight_decay = 0.0
    config.checkpoint.save_interval_steps = 20
    # GRPO batches depend on the current model, so a rollback has no fixed batches to skip.
    config.guard.spike_window = 0
    config.guard.max_rollbacks = 0
    config.export.at_end = True


def learn_preferences(config: ConfigDict, shape: str) -> None:
    """Trains a reward model for one epoch, with the batch and learning rate of "Llama 2"."""
    config.train.objective = 'reward'
    config.train.init_from = f'runs/code-{shape}-instruct'
    config.train.num_epochs = 1.0
    config.data.path = f'data/code-{shape}-pairs'
    config.optimizer.learning_rate = 1e-5
    config.optimizer.weight_decay = 0.0


def follow_preferences(config: ConfigDict, shape: str) -> None:
    """Reinforces responses with high scores of the reward model, close to the model that solves programming tasks."""
    config.train.init_from = f'runs/code-{shape}-rl'
    config.grpo.prompts = 'data/questions.jsonl'
    config.grpo.reward = 'reward_model'
    config.grpo.reward_model = f'runs/code-{shape}-reward'
    config.grpo.kl_coef = 0.01


def learn_from_feedback(config: ConfigDict, shape: str) -> None:
    """Reinforces programs that pass their tests at the first or the second attempt, after the result of the first."""
    config.train.init_from = f'runs/code-{shape}-rl'
    config.grpo.reward = default().grpo.reward
    config.grpo.environment = 'examples.write_function:WriteFunction'
    config.grpo.max_turns = 2
