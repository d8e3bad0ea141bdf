"""Every key of a run, declared once, with its default and what it means."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from maxlm.config.schema_logging import AlertsConfig, EvalConfig, MetricsConfig, ProfileConfig
from maxlm.config.schema_rl import DpoConfig, GrpoConfig

# The default of a switch that the model's family sets, unless the config does.
FAMILY: Any = None
# What a key that may be 'auto' has then, as long as it is not decided.
AUTO = -1
# Length of a run whose budget decides on it, as long as its pace is not measured.
UNDECIDED_STEPS = 10**7


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    # Named settings of the switches that are left at FAMILY below: gpt2, gpt_neox, llama, qwen3, nanochat
    # (maxlm/config/families.py).
    family: str = 'gpt2'
    # Number of token ids; 0 = the data set's. May be larger than the data set's, for a round number.
    vocab_size: int = 0
    # Decoder blocks.
    num_layers: int = 0
    # Width of the residual stream.
    dim: int = 0
    # Query heads.
    num_heads: int = 0
    # Key/value heads (grouped-query attention); 0 = num_heads.
    num_kv_heads: int = 0
    # Width of a head; 0 = dim / num_heads.
    head_dim: int = 0
    # Inner width of the feed-forward; 0 = 4 · dim, or for swiglu 8/3 · dim rounded up to a multiple of 128.
    ffn_dim: int = 0
    # Rows of the learned position table, and the longest context that sampling will use; 0 = data.seq_len.
    max_positions: int = 0
    # learned | rotary.
    position_embedding: str = FAMILY
    # Share of each head that is rotated, from its start.
    partial_rotary_factor: float = FAMILY
    # Base of the rotary frequencies.
    rope_theta: float = FAMILY
    # How rotary frequencies are changed for contexts longer than those of the first training: none | linear | dynamic |
    # yarn | llama3.
    rope_scaling: str = 'none'
    # How many times longer.
    rope_scaling_factor: float = 1.0
    # Context of the first training, from which dynamic, yarn and llama3 scale; 0 = max_positions / rope_scaling_factor.
    original_max_positions: int = 0
    # llama3: turns within the original context below which a frequency is divided by the factor, above which it stays.
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    # yarn: the same two bounds.
    rope_beta_slow: float = 1.0
    rope_beta_fast: float = 32.0
    # yarn: the bounds are rounded to whole pairs.
    rope_truncate: bool = True
    # yarn: queries and keys are multiplied by it; 0 = 0.1 · ln(rope_scaling_factor) + 1.
    rope_attention_factor: float = 0.0
    # layernorm | rmsnorm.
    norm: str = FAMILY
    # Added to the variance before the square root.
    norm_epsilon: float = FAMILY
    # Norms have a learned scale.
    norm_use_scale: bool = FAMILY
    # Queries and keys are normalized per head, before the rotation.
    qk_norm: bool = FAMILY
    # Embeddings are normalized before the first block.
    embedding_norm: bool = FAMILY
    # Logits are bent into ±logit_softcap by a tanh; 0 = not.
    logit_softcap: float = FAMILY
    # gelu | gelu_tanh | swiglu | relu2.
    activation: str = FAMILY
    # Biases in the projections of attention and feed-forward, and in LayerNorm.
    use_bias: bool = FAMILY
    # Attention and feed-forward read the same input and are added together.
    parallel_residual: bool = FAMILY
    # The output projection is the transposed embedding.
    tie_embeddings: bool = FAMILY
    # Which layers attend how far, repeated over the layers: L = the whole context, S = the last sliding_window tokens.
    attention_pattern: str = 'L'
    # Tokens that an S layer attends to, the query's own included.
    sliding_window: int = 0
    # Initialization of the weights: normal | small | uniform (maxlm/model/layers/initializers.py).
    init: str = FAMILY
    # normal: standard deviation, of which residual outputs get 1 / sqrt(2 · num_layers); uniform: that of a tied
    # embedding.
    init_std: float = 0.02
    # Probability that an element is dropped, after the embedding and at the end of each residual branch.
    dropout: float = 0.0
    # Type of the computation: bfloat16 | float16 (with a loss scale) | float32. Parameters are always float32.
    dtype: str = 'bfloat16'
    # Products of the blocks' projections: default (in that type) | fp8 (8-bit floats, in both passes:
    # maxlm/model/layers/fp8.py). For GPUs from Ada and Hopper on; a CPU computes the same, slowly.
    matmul_precision: str = 'default'
    # How the blocks' kernels are stored: float (in float32, the only one that is trained) | int8 | int4 | fp8, as
    # maxlm.quantize writes them (maxlm/model/layers/weight_only_quantization.py).
    weight_quantization: str = 'float'
    # Inputs of a projection that share a scale; 0 = all.
    quantization_group_size: int = 0
    # What the backward pass keeps of a block: none (keep all) | dots | dots_no_batch | full (keep the inputs only) |
    # offload (the inputs only, in host memory).
    remat_policy: str = 'none'
    # One compiled block in a loop (compile time independent of depth), or every block written out.
    scan_layers: bool = True
    # Rank of low-rank adapters (Hu et al. 2022, "LoRA"), which are then what is trained; 0 = none.
    lora_rank: int = 0
    # What the adapters add counts lora_alpha / lora_rank times.
    lora_alpha: float = 16.0
    # Projections of the blocks that have adapters, by patterns: ('attention.*',), ('*.query', '*.value').
    lora_target_modules: tuple = ('*',)
    # Attention kernel: auto | xla | cudnn (GPU) | splash (TPU). auto = cudnn or splash where it applies, otherwise xla.
    attention: str = 'auto'


@dataclasses.dataclass(frozen=True)
class DataConfig:
    # Directory that `maxlm.prepare --output` wrote, or a copy of it in a bucket (gs://…, s3://…).
    path: str = 'data'
    # Several such directories instead, each with its weight: (('data/web', 0.7), ('data/code', 0.3)). 'DIR#SOURCE' is
    # one of the sources within a directory. Weights are shares of the training windows.
    sources: tuple = ()
    # Passes over a source of data.sources above which the start of the run warns (up to 4 are nearly as good as new
    # text: Muennighoff et al. 2023, "Scaling Data-Constrained Language Models").
    warn_epochs: float = 4.0
    # Tokens in one training sequence.
    seq_len: int = 1024
    # Shorter sequences that the run starts with, each with the share of the steps at which it ends: ((256, 0.5),
    # (512, 0.8)). Windows are then cut; tokens of a batch and their order stay the same.
    seq_len_schedule: tuple = ()
    # Seed of the order of the windows.
    seed: int = 0
    # Shards whose windows are shuffled together, and read before the next ones; 0 = all of the data set.
    shuffle_shards: int = 0
    # A run may go on although its data changed, at the same step of the new order.
    allow_dataset_change: bool = False
    # Documents that share a window cannot attend to each other, and positions start again in each.
    document_mask: bool = True
    # Threads that read batches ahead, in this process or in each worker.
    num_threads: int = 4
    # Batches that are kept ready.
    prefetch_buffer_size: int = 8
    # Processes that read batches; 0 = threads of this process. The order does not depend on it.
    num_workers: int = 0
    # Directory that shards from a bucket are fetched to, ahead of use.
    cache_dir: str = '~/.cache/maxlm'
    # GiB that they may take; the ones that have been used make room. 0 = no bound.
    cache_limit_gib: float = 0.0
    # Shards that are fetched at the same time.
    download_threads: int = 8


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    # Length of the run, given as exactly one of the five. One in hours or dollars becomes a number of steps, which
    # follows the measured throughput, so that the schedule ends with it; time of all attempts of the run counts.
    num_steps: int = 0
    num_tokens: int = 0
    num_epochs: float = 0.0
    hours: float = 0.0
    dollars: float = 0.0
    # Dollars for one device for one hour, by which dollars are counted.
    price_per_hour: float = 0.0
    # Sequences in one optimizer step over all devices, given here or in tokens (a multiple of data.seq_len).
    global_batch_size: int = 0
    global_batch_size_tokens: int = 0
    # Sequences that one device works on at a time; gradients are accumulated until the global batch is full.
    # 0 = no accumulation; 'auto' (AUTO) = as many as fit its memory.
    per_device_batch_size: int = 0
    # Steps between two log lines.
    log_every: int = 10
    # Seed of the initial parameters and of dropout.
    seed: int = 0
    # Positions of each sequence whose logits exist at the same time.
    loss_chunk_size: int = 256
    # Weight of the square of log Σ exp(logits), which keeps logits from drifting (PaLM: 1e-4); 0 = off.
    z_loss: float = 0.0
    # What is minimized: next_token (cross-entropy) | dpo (of pairs of answers: section dpo) | grpo (of responses by
    # their rewards: section grpo, for maxlm.grpo).
    objective: str = 'next_token'
    # Checkpoint whose parameters a new run starts from: WORKDIR (its newest step), WORKDIR@STEP or a step's directory.
    # What it has not, adapters and the rows of new tokens, starts anew.
    init_from: str = ''
    # float16: what the loss is multiplied by at first, so that small gradients do not vanish. An overflow halves it and
    # leaves the step out; so many steps without one double it.
    initial_loss_scale: float = 32768.0
    loss_scale_growth_interval: int = 2000
    # Directory for compiled programs, so that a run that starts again does not compile again; evaluation and sampling
    # use it too. It must be yours alone, since what lies there is run, and the same for all processes. '' = none. Where
    # JAX_COMPILATION_CACHE_DIR is set, that counts.
    compilation_cache_dir: str = '~/.cache/maxlm/programs'
    # Seconds without a step, outside of compiling, evaluating and saving, after which a process counts as stuck: it
    # tells where it stands and ends the run with exit code 75.
    hang_timeout_seconds: float = 600.0


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    # adamw | muon (Muon on the matrices of the blocks, AdamW on the rest).
    name: str = 'adamw'
    # Peak learning rate; under muon that of its matrices.
    learning_rate: float = 3e-4
    # Peak learning rate of what muon leaves to AdamW: embeddings, head, scales, biases; 0 = learning_rate.
    adam_learning_rate: float = 0.0
    # Peak learning rate of the embedding tables; 0 = that of AdamW.
    embedding_learning_rate: float = 0.0
    # cosine | linear | wsd (stable, then a linear decay) | constant, after a linear warm-up from 0.
    schedule: str = 'cosine'
    # wsd: share of the run that its decay takes, at the end.
    wsd_decay_fraction: float = 0.2
    # Length of the warm-up, given in steps or in tokens.
    warmup_steps: int = 0
    warmup_tokens: int = 0
    # Where cosine, linear and wsd end, for a peak of learning_rate; other peaks rise and fall in proportion.
    min_learning_rate: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    # How the moments are stored: float32 | bfloat16 | int8 (in blocks: Dettmers et al. 2022, "8-bit Optimizers via
    # Block-wise Quantization").
    moment_dtype: str = 'float32'
    # Added to the root of the second moment.
    eps: float = 1e-8
    # muon: Nesterov momentum, and the steps over which it rises to that from 0.85.
    muon_momentum: float = 0.95
    muon_momentum_warmup_steps: int = 0
    # Decoupled weight decay.
    weight_decay: float = 0.1
    # What it applies to: matrices (embeddings included) | projections (embeddings and head left out) | all (scales and
    # biases too).
    weight_decay_mask: str = 'matrices'
    # Parameters that are not trained, by patterns of their dotted names: ('embedding', 'blocks.attention.*').
    frozen_params: tuple = ()
    # Parameters that are trained although `frozen` names them, or although there are adapters: ('embedding', 'head.*').
    trainable_params: tuple = ()
    # Largest global norm of the gradient; 0 = not clipped.
    max_grad_norm: float = 1.0
    # Decay per step of a moving average of the parameters, which is then what is evaluated and used; 0 = off. At
    # update n it is at most (1 + n) / (10 + n).
    ema_decay: float = 0.0


# From the slowest links to the fastest: neighbours along the last axis are neighbours in the machine.
MESH_AXES = ('replica', 'stage', 'data', 'fsdp', 'context', 'tensor')


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    # Devices along each axis; one of them may be -1, which takes what is left.
    # Whole copies of the layout below (across slow links).
    replica: int = 1
    # Pipeline: consecutive layers on different devices.
    stage: int = 1
    # Data parallel, parameters replicated.
    data: int = 1
    # Data parallel, with the state sharded as `zero` says.
    fsdp: int = -1
    # The sequence split over devices (ring attention).
    context: int = 1
    # Heads and feed-forward of a block split over devices.
    tensor: int = 1
    # What is sharded over fsdp and context (Rajbhandari et al. 2020, "ZeRO"): 1 = optimizer state | 2 = gradients too |
    # 3 = parameters too.
    zero_stage: int = 3
    # Times that the layers go round the stages; more of them make idle time shorter.
    num_pipeline_repeats: int = 1
    # What lives in host memory and comes to the device a layer at a time: none | optimizer | all (parameters too).
    host_offload: str = 'none'

    @property
    def sizes(self) -> dict[str, int]:
        """Devices along each axis, in the order of the axes."""
        return {axis: getattr(self, axis) for axis in MESH_AXES}


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    # Steps between two checkpoints; 0 = by time only, and the last step.
    save_interval_steps: int = 1000
    # Minutes since the last save after which the next step is saved, whatever its number; 0 = by steps only.
    save_interval_minutes: float = 20.0
    # Newest checkpoints that are kept.
    max_to_keep: int = 5
    # Checkpoints with the lowest validation loss that are kept too, of those that were saved at an evaluation.
    keep_best: int = 1
    # Every so many steps a checkpoint is saved and never deleted; 0 = none.
    keep_period: int = 0
    # gs://bucket/run or s3://bucket/run: a copy of the workdir there, uploaded in the background; '' = none.
    remote_dir: str = ''


@dataclasses.dataclass(frozen=True)
class GuardConfig:
    # Good steps by which spikes of loss and gradient norm are told; from when there are as many, steps that spike are
    # left out. 0 = only those are that are not finite.
    spike_window: int = 128
    # Robust standard deviations above the median from which on a step spikes.
    spike_threshold: float = 10.0
    # Consecutive steps with a spike or a value that is not finite after which the run rolls back or, after
    # max_rollbacks, stops with exit code 1. Each of these steps is skipped.
    max_consecutive_skips: int = 20
    # Times that a run goes back to a checkpoint from before such steps and leaves out their batches; 0 = it stops.
    max_rollbacks: int = 2
    # Steps before the first bad one whose batches are left out then too.
    rollback_skip_steps: int = 20
    # What a rollback multiplies learning rates by; 1 = they stay.
    rollback_lr_factor: float = 1.0
    # Evaluations without a lower validation loss after which the run ends (exit code 0); 0 = it does not.
    early_stopping_patience: int = 0
    # How much lower a validation loss must be to count.
    early_stopping_min_delta: float = 0.0
    # Cost limit of all attempts of the run; at the limit the run saves its state and ends (exit code 0).
    # 0 = no bound.
    max_hours: float = 0.0
    max_dollars: float = 0.0


@dataclasses.dataclass(frozen=True)
class Config:
    """One run. Sections as users write them: `--config.train.num_steps=100`."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    dpo: DpoConfig = dataclasses.field(default_factory=DpoConfig)
    grpo: GrpoConfig = dataclasses.field(default_factory=GrpoConfig)
    alerts: AlertsConfig = dataclasses.field(default_factory=AlertsConfig)
    guard: GuardConfig = dataclasses.field(default_factory=GuardConfig)
    metrics: MetricsConfig = dataclasses.field(default_factory=MetricsConfig)
    profile: ProfileConfig = dataclasses.field(default_factory=ProfileConfig)

    @property
    def has_reference(self) -> bool:
        """Whether what is minimized looks at the model that the run starts from."""
        return self.train.objective == 'dpo' or (self.train.objective == 'grpo' and self.grpo.kl_coef > 0)

    @property
    def by_budget(self) -> bool:
        """Returns whether hours or dollars give the length, which is then decided during the run."""
        return bool(self.train.hours or self.train.dollars)

    @property
    def batch_shards(self) -> int:
        """Devices that the batch is split over (resolved configs only)."""
        return self.mesh.replica * self.mesh.data * self.mesh.fsdp

    def at_context(self, window: int) -> Config:
        """The run while its sequences are shorter: windows are cut, tokens stay (resolved configs only)."""
        parts = self.data.seq_len // window
        train = dataclasses.replace(
            self.train,
            global_batch_size=self.train.global_batch_size * parts,
            per_device_batch_size=self.train.per_device_batch_size * parts,
        )
        return dataclasses.replace(self, data=dataclasses.replace(self.data, seq_len=window), train=train)

    @property
    def contexts(self) -> list[tuple[int, int]]:
        """(first step, from 0, length of the sequences) of each part of the run (resolved configs only)."""
        lengths = [*(window for window, _ in self.data.seq_len_schedule), self.data.seq_len]
        starts = [0, *(round(share * self.train.num_steps) for _, share in self.data.seq_len_schedule)]
        return list(zip(starts, lengths, strict=True))

    def context_at(self, step: int) -> int:
        """Length of the sequences in step number `step`, from 0 (resolved configs only)."""
        return [window for first_step, window in self.contexts if first_step <= step][-1]

    @property
    def accumulation(self) -> int:
        """Micro-batches in one optimizer step (resolved configs only)."""
        return self.train.global_batch_size // (self.train.per_device_batch_size * self.batch_shards)

    @property
    def rounds(self) -> int:
        """Times that the model is run for one optimizer step: a pipeline takes all micro-batches at once."""
        return self.accumulation if self.mesh.stage == 1 else 1


SECTIONS: dict[str, type] = {
    field.name: typing.get_type_hints(Config)[field.name] for field in dataclasses.fields(Config)
}
