"""Llama models from 85M to 1.46B parameters for 8 × A100: a published series on four weighted sources, then GRPO.

Command:   maxlm recipe --config=configs/mix.py:xlarge
           converts the questions, prepares the four sources from the hub with one tokenizer, trains in runs/mix-xlarge,
           then with GRPO in runs/mix-xlarge-rl, exports the model, and evaluates it on MMLU, MedQA and ARC.
           source45=A source25=B source20=C source10=D replace the sources: each is a path, a URL or hf:NAME
Variants:  tiny · small · medium · medium-large · large · xlarge, each with -rl for GRPO after it
           smoke and smoke-rl: two narrow layers and 10 steps, to try the recipe on a CPU
           To train on one data set instead: --config.data.sources='()' --config.data.path=data/mine
Data:      45 % FineWeb-Edu, 25 % Cosmopedia, 20 % FinePDFs, 10 % questions of the USMLE with their answers (MedQA). The
           order of the published weights is assumed, and so is the choice of the configurations, which exist
Hardware:  8 × A100; tiny and small on one GPU, or on a CPU for a trial
Time:      11 billion tokens, 83 924 steps; 39 hours for xlarge at its published 79 200 tokens/s. -rl: 200 steps of 1024
           responses, 16 to each question
Memory:    compiled ahead of time: xlarge 23 GiB on each of 8 × H100; small 12 GiB on an RTX 4090
Expected:  speed and loss are not measured yet

Layers, widths, batch size, learning rates, warm-up and source weights are the published values. Vocabulary, heads and
feed-forward widths were not published. A tied vocabulary of 100 224 and a feed-forward width of 9/4 of the model width
reproduce the published parameter counts of five variants to the last digit.
The variant medium has 373M, where 374M was published. Steps, batch and learning rate of GRPO are ours.
"""

from ml_collections import ConfigDict

from maxlm.config.loading import default
from maxlm.config.smoke import shrink, shrink_rollouts
from maxlm.errors import InputError

# variant → (layers, width, heads)
SHAPES = {
    'tiny': (12, 512, 8),
    'small': (16, 768, 12),
    'medium': (24, 1024, 16),
    'medium-large': (20, 1152, 18),
    'large': (24, 1536, 12),
    'xlarge': (32, 1920, 15),
}
TOKENS_PER_STEP = 2**17
# Percentage → the source on the hub, with the part that is prepared. The questions are written by the first phase.
# Names, configurations, files and fields as of November 2026:
# https://huggingface.co/datasets/HuggingFaceFW/fineweb-edu: sample/10BT/000_00000.parquet …, field `text`
# https://huggingface.co/datasets/HuggingFaceTB/cosmopedia: data/web_samples_v2, 118 files, field `text`
# https://huggingface.co/datasets/HuggingFaceFW/finepdfs: data/eng_Latn/train/000_00000.parquet …, field `text`
# https://huggingface.co/datasets/GBaker/MedQA-USMLE-4-options: 10,178 questions for training and 1,273 for the test,
# fields `question`, `options` and `answer_idx`
QUESTIONS = 'hf:GBaker/MedQA-USMLE-4-options'
SOURCES = {
    45: 'hf:HuggingFaceFW/fineweb-edu:sample-10BT',
    25: 'hf:HuggingFaceTB/cosmopedia:web_samples_v2 --max-files 40',
    20: 'hf:HuggingFaceFW/finepdfs:eng_Latn --max-files 8',
    10: '',
}
# Each benchmark is a phase. A field of the same name replaces its task, for example by a local task file.
BENCHMARKS = ('mmlu', 'medqa', 'arc')


def get_phases(variant: str = 'xlarge') -> list[str]:
    if variant not in (*SHAPES, 'smoke'):
        raise InputError(f'configs/mix.py:{variant} has no phases; use --config=configs/mix.py:xlarge')
    data, size = ('data/mix-smoke', 300) if variant == 'smoke' else ('data/mix', 100_224)
    sources = {**SOURCES, 10: f'{data}-questions/texts.jsonl'}
    first, *others = sources
    run = f'runs/mix-{variant}-rl'
    return [
        f'questions --input {{questions:{QUESTIONS}}} --output {data}-questions',
        f'prepare --input {{source{first}:{sources[first]}}} --output {data}-{first} '
        f'--tokenizer {{tokenizer:bpe:{size}}}',
        *(
            f'prepare --input {{source{weight}:{sources[weight]}}} --output {data}-{weight} '
            f'--tokenizer {data}-{first}/tokenizer.json'
            for weight in others
        ),
        f'train --config={{config}}:{variant}',
        f'grpo --config={{config}}:{variant}-rl',
        *(f'evaluate --checkpoint={run} --tasks={{{name}:{name}}} --output={run}/{name}' for name in BENCHMARKS),
    ]


def get_config(variant: str = 'xlarge') -> ConfigDict:
    shape, is_rl = variant.removesuffix('-rl'), variant.endswith('-rl')
    if shape not in (*SHAPES, 'smoke'):
        names = ', '.join(f'{name}, {name}-rl' for name in (*SHAPES, 'smoke'))
        raise InputError(f'configs/mix.py has no variant {variant!r}; there are: {names}')
    is_smoke = shape == 'smoke'
    data = 'data/mix-smoke' if is_smoke else 'data/mix'
    config = pretraining(*SHAPES['tiny' if is_smoke else shape])
    config.data.sources = tuple((f'{data}-{weight}', weight / 100) for weight in SOURCES)
    if is_rl:
        answer_questions(config, f'runs/mix-{shape}', f'{data}-questions')
    if is_smoke:
        shrink(config)
        if is_rl:
            shrink_rollouts(config)
    return config


def pretraining(num_layers: int, dim: int, num_heads: int) -> ConfigDict:
    config = default()

    config.model.family = 'llama'
    config.model.vocab_size = 100_224
    config.model.num_layers = num_layers
    config.model.dim = dim
    config.model.num_heads = num_heads
    config.model.ffn_dim = 9 * dim // 4
    config.model.tie_embeddings = True
    # Compiled for 8 × H100, xlarge is as fast with small micro-batches as with rematerialization. A loop over layers
    # would copy the saved activations.
    config.model.remat_policy = 'none'
    config.model.scan_layers = False

    # Gathers parameters once per step.
    config.mesh.zero_stage = 2

    config.data.seq_len = 2048

    config.train.num_tokens = 11_000_000_000
    config.train.global_batch_size_tokens = TOKENS_PER_STEP
    config.train.per_device_batch_size = 8 if dim < 1500 else 4

    config.eval.interval = 500
    config.eval.num_batches = 4
    config.eval.num_samples = 4

    config.optimizer.learning_rate = 3e-4
    config.optimizer.min_learning_rate = 3e-5
    config.optimizer.warmup_tokens = 100_000_000
    config.optimizer.max_grad_norm = 1.0

    config.checkpoint.save_interval_steps = 500
    config.checkpoint.max_to_keep = 1
    config.checkpoint.keep_best = 3
    config.export.at_end = True
    return config


def answer_questions(config: ConfigDict, start: str, data: str) -> None:
    """Reinforces correct letters, with 16 responses to each question."""
    config.train.objective = 'grpo'
    config.train.init_from = start
    config.train.num_tokens = 0
    config.train.num_steps = 200
    config.train.global_batch_size_tokens = 0
    config.train.global_batch_size = 1024
    config.data.sources = ()
    config.data.seq_len = 1024

    config.grpo.prompts = f'{data}/prompts.jsonl'
    config.grpo.eval_prompts = f'{data}/held_out.jsonl'
    config.grpo.reward = 'choice'
    config.grpo.num_generations = 16
    config.grpo.prompts_per_rollout = 64
    # A letter and, if the model continues as in its texts, the option.
    config.grpo.max_completion_length = 32

    config.eval.interval = 50

    config.optimizer.learning_rate = 1e-6
    config.optimizer.min_learning_rate = 0.0
    config.optimizer.schedule = 'constant'
    config.optimizer.warmup_tokens = 0
    config.optimizer.warmup_steps = 10
    config.optimizer.weight_decay = 0.0
    config.checkpoint.save_interval_steps = 20
    # GRPO batches depend on the current model, so a rollback has no fixed batches to skip.
    config.guard.spike_window = 0
    config.guard.max_rollbacks = 0
