"""Schema of the config: the sections with all keys, and properties that follow from several keys.

The field of a key is its only declaration; see `maxlm.config.sections.declaration`.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from maxlm.config.sections.declaration import CheckpointPath, Form, FunctionName, Renamed, ValueBefore
from maxlm.config.sections.distill import DistillConfig
from maxlm.config.sections.model import ModelConfig
from maxlm.config.sections.monitoring import AlertsConfig, EvalConfig, MetricsConfig, ProfileConfig
from maxlm.config.sections.optimizer import GuardConfig, OptimizerConfig
from maxlm.config.sections.posttraining import DpoConfig, GrpoConfig, RewardModelConfig
from maxlm.config.sections.ranges import INT32, Range, Seed, Steps, StepsFrom1, Weight
from maxlm.storage.paths import ANY, BUCKETS, Kind, PathOption

# Value of a key set to 'auto' until it is resolved.
AUTO = -1
# Placeholder number of steps until throughput is measured (runs given in hours or dollars).
UNDECIDED_STEPS = 10**7
# Values of export.architecture beside 'auto': the rows of `maxlm.huggingface.architectures.table`.
ArchitectureName = Literal[
    'gpt2',
    'gpt_neox',
    'llama',
    'mistral',
    'qwen2',
    'qwen3',
    'smollm3',
    'olmo2',
    'olmo3',
    'granite',
    'phi3',
    'gemma2',
    'gemma3_text',
    'mixtral',
    'qwen3_moe',
    'deepseek_v2',
    'deepseek_v3',
    'gpt_oss',
    'starcoder2',
    'nanochat',
]


@dataclasses.dataclass(frozen=True)
class DataConfig:
    # Directory written by `maxlm prepare --output`, or a copy of it in a bucket (gs://…, s3://…). A dataset of the
    # Hugging Face hub (hf:NAME[:CONFIG][@REVISION][#SPLIT]) is prepared in the background while the run trains.
    path: Annotated[str, PathOption(Kind.DIRECTORY, ANY)] = 'data'
    # Several data directories with weights, instead of data.path: (('data/web', 0.7), ('data/code', 0.3)). 'DIR#SOURCE'
    # selects one source within a directory. Weights are proportions of the training sequences.
    sources: Annotated[tuple, PathOption(urls=ANY)] = ()
    # Other weights of data.sources at the start of the run, each with the fraction of the steps at which it ends:
    # (((0.7, 0.3), 0.8),). A weight of 0 leaves a source out.
    sources_schedule: tuple = ()
    # Tokenizer for data of the Hugging Face hub, as in `maxlm prepare --tokenizer`: a tokenizer.json, hf:NAME, bpe:N …
    tokenizer: Annotated[str, PathOption(may_be_empty=True)] = ''
    # Number of epochs over a source of data.sources above which the run warns at the start. Up to 4 epochs are nearly
    # as good as new text (Muennighoff et al. 2023, "Scaling Data-Constrained Language Models").
    warn_epochs: Annotated[float, Range(1, 1e5)] = 4.0
    # Tokens in one training sequence.
    seq_len: Annotated[int, Range(2, 2**24), Renamed('window')] = 1024
    # Shorter sequence lengths at the start of the run, each with the fraction of the steps at which it ends:
    # ((256, 0.5), (512, 0.8)). Sequences are split; the tokens of a batch and their order stay the same.
    seq_len_schedule: Annotated[tuple, Renamed('context_schedule')] = ()
    # Training sequences. stream: consecutive tokens, which can begin within a document. documents: documents packed by
    # best fit; each sequence begins at a document, and the rest of a document that does not fit is not trained.
    # best_fit: as documents, but the rest begins the next sequence. Validation always reads the stream.
    rows: Literal['stream', 'documents', 'best_fit'] = 'stream'
    # Seed of the order of the training sequences.
    seed: Seed = 0
    # Number of shards whose sequences are shuffled together and read before the next ones; 0 = all shards, or one shard
    # in the first epoch of data that can be used during its preparation.
    shuffle_shards: Annotated[int, Range(0, 10**9), Renamed('pool_shards')] = 0
    # Allow a run to resume after its data changed, at the same step of the new order.
    allow_dataset_change: Annotated[bool, Renamed('allow_change')] = False
    # Prevent attention between documents in one sequence, and restart positions at each document.
    document_mask: Annotated[bool, Renamed('isolate_documents')] = True
    # Train the first token of each document, which the end-of-document token before it predicts. Loss masks of
    # conversations take precedence. A run keeps the value with which it began.
    train_first_token: Annotated[bool, ValueBefore(False)] = True
    # Number of threads that prefetch batches, in this process or in each worker.
    num_threads: Annotated[int, Range(1, 1024), Renamed('threads')] = 4
    # Number of prefetched batches.
    prefetch_buffer_size: Annotated[int, Range(1, 10**5), Renamed('prefetch')] = 8
    # Number of worker processes that read batches; 0 = threads of this process. The order does not depend on it.
    num_workers: Annotated[int, Range(0, 1024), Renamed('workers')] = 0
    # Cache directory for shards downloaded from a bucket, before they are used, for prepared data of the hub, and for
    # the indices of data.rows.
    cache_dir: Annotated[str, PathOption(Kind.DIRECTORY, keep_home=True), Renamed('cache')] = '~/.cache/maxlm'
    # Size limit of the cache in GiB; used shards are evicted. 0 = unlimited.
    cache_limit_gib: Annotated[float, Range(0, 1e9), Renamed('cache_gib')] = 0.0
    # Number of concurrent shard downloads.
    download_threads: Annotated[int, Range(1, 1024), Renamed('fetch_threads')] = 8

    @property
    def source_fractions(self) -> tuple[float, ...]:
        """Returns the fraction of each entry of `sources` in the training sequences of a complete run."""
        stages = [*self.sources_schedule, (tuple(weight for _, weight in self.sources), 1.0)]
        starts = [0.0, *(stop for _, stop in self.sources_schedule)]
        by_stage = [
            [(stop - start) * weight / sum(weights) for weight in weights]
            for start, (weights, stop) in zip(starts, stages, strict=True)
        ]
        return tuple(map(sum, zip(*by_stage, strict=True)))


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    # Length of the run; exactly one of the five keys must be set. A length in hours or dollars is converted to a number
    # of steps that follows the measured throughput, so that the schedule ends with it. All attempts of the run count.
    num_steps: Steps = 0
    num_tokens: Annotated[int, Range(0, 10**18)] = 0
    num_epochs: Annotated[float, Range(0, 1e6)] = 0.0
    hours: Annotated[float, Range(0, 1e5)] = 0.0
    dollars: Annotated[float, Range(0, 1e10)] = 0.0
    # Price of one device per hour, in dollars.
    price_per_hour: Annotated[float, Range(0, 1e5)] = 0.0
    # Number of sequences per optimizer step over all devices, given here or in tokens (a multiple of data.seq_len).
    global_batch_size: Annotated[int, Range(0, 10**8), Renamed('global_batch')] = 0
    global_batch_size_tokens: Annotated[int, Range(0, 10**12), Renamed('global_batch_tokens')] = 0
    # Sequences per device and forward pass; gradients are accumulated until the global batch is complete.
    # 0 = no accumulation; 'auto' (AUTO) = as many as fit into device memory.
    per_device_batch_size: Annotated[int, Range(AUTO, 10**8), Form.OR_AUTO, Renamed('micro_batch')] = 0
    # Steps between two log lines.
    log_every: StepsFrom1 = 10
    # Seed of the initial parameters and of dropout.
    seed: Seed = 0
    # Compute the same bits in each run on the same devices, software and settings. Steps on GPUs are slower. CPUs and
    # TPUs always do. See docs/reliability.md.
    deterministic: bool = False
    # Before a run starts on GPUs or TPUs, compare its kernels with formulas in float32. A wrong result stops the run.
    check_kernels: bool = True
    # Tokens of a device whose logits are in memory at the same time. Each chunk writes the gradient of the head once,
    # so small chunks increase the memory traffic.
    loss_chunk_tokens: Annotated[
        int, Range(1, INT32), Renamed('loss_chunk', least=4096), Renamed('loss_chunk_size', least=4096)
    ] = 4096
    # Weight of the z-loss, the square of log Σ exp(logits), which prevents drifting logits (PaLM: 1e-4); 0 = off.
    z_loss: Weight = 0.0
    # Weight of the load-balancing loss of experts (Fedus et al. 2022, "Switch Transformers"); 0 = off.
    load_balancing_loss: Weight = 0.01
    # Weight of the z-loss of the router's logits (Zoph et al. 2022, "ST-MoE": 0.001); 0 = off.
    router_z_loss: Weight = 0.0
    # Change of the bias of model.router_balance_bias per step, toward a balanced load (DeepSeek-V3: 0.001).
    router_bias_rate: Weight = 0.001
    # Weight of the mean cross-entropy of the model.mtp_depth additional tokens. DeepSeek-V3 starts with 0.3 and ends
    # with 0.1.
    mtp_loss_weight: Annotated[float, Range(0, 1000, above=True)] = 0.3
    # Training objective. next_token: cross-entropy; dpo: pairs of answers (section dpo); reward: a reward model from
    # pairs of answers (section reward_model); grpo: rewards of responses (section grpo, for maxlm grpo).
    objective: Literal['next_token', 'dpo', 'reward', 'grpo'] = 'next_token'
    # Loss of your own for the next token, a function (logits, targets) → loss of each target; '' = cross-entropy.
    # Evaluation always computes the cross-entropy.
    loss: Literal[''] | FunctionName = ''
    # Checkpoint that initializes the parameters of a new run: WORKDIR (newest step), WORKDIR@STEP, WORKDIR@best or the
    # directory of a step. Parameters missing from it (adapters, rows for new tokens) are freshly initialized.
    init_from: CheckpointPath = ''
    # Take the section `model` from the run of init_from, except for keys given on the command line and the adapters
    # (model.lora_*) of a config that has some. So one config fits every base. The config.json of the run contains the
    # result and False.
    init_model_config: bool = False
    # Noise of the experts of a model that starts from a dense checkpoint, relative to the standard deviation of each
    # parameter.
    upcycling_noise: Weight = 0.01
    # float16: initial loss scale, which prevents underflow of small gradients. An overflow halves the scale and skips
    # the step; loss_scale_growth_interval steps without overflow double it.
    initial_loss_scale: Annotated[float, Range(1, 2**30), Renamed('loss_scale')] = 32768.0
    loss_scale_growth_interval: Annotated[StepsFrom1, Renamed('loss_scale_steps')] = 2000
    # Directory of the compilation cache, which saves compilation when a run restarts; evaluation and sampling use it
    # too. Only you may have write access, because its contents are executed. All processes must use the same directory.
    # '' = none. JAX_COMPILATION_CACHE_DIR takes precedence if it is set.
    compilation_cache_dir: Annotated[str, PathOption(may_be_empty=True, keep_home=True), Renamed('compile_cache')] = (
        '~/.cache/maxlm/programs'
    )
    # Seconds without a step after which a process counts as stuck, not counting compilation, evaluation and saving. It
    # then reports where it is stuck and ends the run with exit code 75.
    hang_timeout_seconds: Annotated[float, Range(0, 1e8, above=True), Renamed('stuck_seconds')] = 600.0


# Ordered from the slowest links to the fastest: neighbors along the last axis are neighbors in the machine.
MESH_AXES = ('replica', 'stage', 'data', 'fsdp', 'expert', 'context', 'tensor')
# Number of devices; -1 = the remaining devices.
AxisSize = Annotated[int, Range(-1, 2**20)]


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    # Number of devices along each axis. One axis may be -1 and takes the remaining devices.
    # Replicas of the complete layout below (across slow links).
    replica: AxisSize = 1
    # Pipeline parallelism: consecutive layers on different devices.
    stage: AxisSize = 1
    # Data parallelism with replicated parameters.
    data: AxisSize = 1
    # Data parallelism with the state sharded according to `zero_stage`.
    fsdp: AxisSize = -1
    # Expert parallelism: experts on different devices, which exchange tokens (all-to-all). Other parameters are sharded
    # as along fsdp, because these devices process different rows.
    expert: AxisSize = 1
    # Context parallelism: sequences split over devices (ring attention).
    context: AxisSize = 1
    # Tensor parallelism: heads and feed-forward of a block split over devices.
    tensor: AxisSize = 1
    # Arrays sharded over fsdp, expert and context (Rajbhandari et al. 2020, "ZeRO"). 1: optimizer state and float32
    # parameters; 2: also gradients; 3: also the parameters that the micro-batches use.
    zero_stage: Annotated[Literal[1, 2, 3], Renamed('zero')] = 3
    # Number of times that the layers pass through all stages (circular pipeline); higher values reduce idle time.
    num_pipeline_repeats: Annotated[int, Range(1, 1000), Renamed('stage_repeats')] = 1
    # State kept in host memory and moved to the device one layer at a time. all: optimizer state and parameters.
    host_offload: Annotated[Literal['none', 'optimizer', 'all'], Renamed('offload')] = 'none'

    @property
    def sizes(self) -> dict[str, int]:
        """Returns the number of devices along each axis, in the order of MESH_AXES."""
        return {axis: getattr(self, axis) for axis in MESH_AXES}


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    # Steps between two checkpoints; 0 = save by time only, and at the last step.
    save_interval_steps: Annotated[Steps, Renamed('every_steps')] = 1000
    # Minutes since the last checkpoint after which the next step is saved, at any step number; 0 = save by steps only.
    save_interval_minutes: Annotated[float, Range(0, 1e6), Renamed('every_minutes')] = 20.0
    # Number of latest checkpoints to keep.
    max_to_keep: Annotated[StepsFrom1, Renamed('keep_last')] = 5
    # Number of additional checkpoints to keep: those saved at an evaluation with the lowest validation loss.
    keep_best: Steps = 1
    # Steps between permanent checkpoints, which are always saved and never deleted; 0 = none.
    keep_period: Annotated[Steps, Renamed('permanent_every')] = 0
    # Maximum size of all checkpoints of the run, in GiB; 0 = no limit. Beyond it the oldest checkpoints are deleted,
    # then those of keep_best, but never the newest one and those of keep_period.
    max_gib: Annotated[float, Range(0, 1e9)] = 0.0
    # Before each checkpoint, compare the devices that hold the same part of an array. If they differ, a device computes
    # wrong results: the run names it and ends without saving.
    compare_replicas: bool = True
    # Remote copy of the workdir (gs://bucket/run or s3://bucket/run), uploaded in the background; '' = none.
    remote_dir: Annotated[str, PathOption(urls=ANY, may_be_empty=True), Renamed('mirror')] = ''

    @property
    def max_bytes(self) -> int:
        """Returns `max_gib` in bytes."""
        return int(self.max_gib * 2**30)


@dataclasses.dataclass(frozen=True)
class ExportConfig:
    # When the run is complete, export its final parameters (their EMA if there is one) in the format of Hugging Face.
    at_end: bool = False
    # Directory or URL (gs://bucket/model or s3://bucket/model) of the export. '' = WORKDIR/hf, which is also uploaded
    # to checkpoint.remote_dir.
    to: Annotated[str, PathOption(Kind.DIRECTORY, BUCKETS, may_be_empty=True)] = ''
    # Architecture of Transformers, from the table in docs/models.md; auto: one that other programs support. Only
    # Transformers 5 or later can run nanochat.
    architecture: Literal['auto'] | ArchitectureName = 'auto'


@dataclasses.dataclass(frozen=True)
class Config:
    """Config of a run. Users set a key with its section: `--config.train.num_steps=100`.

    `maxlm.Config`, the class of the Python API, extends it by `get`, `replace` and `resolve`.
    """

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    export: ExportConfig = dataclasses.field(default_factory=ExportConfig)
    dpo: DpoConfig = dataclasses.field(default_factory=DpoConfig)
    reward_model: RewardModelConfig = dataclasses.field(default_factory=RewardModelConfig)
    grpo: GrpoConfig = dataclasses.field(default_factory=GrpoConfig)
    alerts: AlertsConfig = dataclasses.field(default_factory=AlertsConfig)
    guard: GuardConfig = dataclasses.field(default_factory=GuardConfig)
    metrics: MetricsConfig = dataclasses.field(default_factory=MetricsConfig)
    profile: ProfileConfig = dataclasses.field(default_factory=ProfileConfig)
    distill: DistillConfig = dataclasses.field(default_factory=DistillConfig)
    # Models of distill.teacher and grpo.reward_model, which are no sections: `maxlm.checkpoint.frozen_models` reads
    # them from the configs of these checkpoints.
    teacher: ModelConfig | None = None
    scorer: ModelConfig | None = None

    @property
    def of_teacher(self) -> Config:
        """Returns the config with the model of the teacher in place of its own (resolved configs only)."""
        assert self.teacher is not None
        return dataclasses.replace(self, model=self.teacher, teacher=None)

    @property
    def of_scorer(self) -> Config:
        """Returns the config with the reward model in place of its own model (resolved configs only)."""
        assert self.scorer is not None
        return dataclasses.replace(self, model=self.scorer, scorer=None)

    @property
    def has_reference(self) -> bool:
        """Returns True if the loss needs the reference model, a copy of the initial parameters."""
        if self.train.objective == 'dpo':
            return self.dpo.loss_type != 'orpo'
        return self.train.objective == 'grpo' and self.grpo.kl_coef > 0

    @property
    def has_reference_point(self) -> bool:
        """Returns True if the loss needs the KL divergence from the reference model before the gradient: KTO."""
        return self.train.objective == 'dpo' and self.dpo.loss_type == 'kto'

    @property
    def steps_per_rollout(self) -> int:
        """Returns the number of GRPO steps that train on the same rollout (resolved configs only)."""
        rows = self.grpo.prompts_per_rollout * self.grpo.num_generations
        return self.grpo.num_iterations * (rows // self.train.global_batch_size)

    @property
    def has_proximal(self) -> bool:
        """Returns True if GRPO batches contain log-probabilities before the first update (resolved configs only).

        If one step trains on each rollout, they are those of the policy itself.
        """
        return self.grpo.max_staleness > 0 and self.steps_per_rollout > 1

    @property
    def by_budget(self) -> bool:
        """Returns True if the run length is given in hours or dollars and is therefore determined during the run."""
        return bool(self.train.hours or self.train.dollars)

    @property
    def batch_shards(self) -> int:
        """Returns the number of devices over which the batch is split (resolved configs only)."""
        return self.mesh.replica * self.mesh.data * self.mesh.fsdp * self.mesh.expert

    def at_context(self, seq_len: int) -> Config:
        """Returns the config for a shorter sequence length with the same tokens per step (resolved configs only)."""
        parts = self.data.seq_len // seq_len
        train = dataclasses.replace(
            self.train,
            global_batch_size=self.train.global_batch_size * parts,
            per_device_batch_size=self.train.per_device_batch_size * parts,
        )
        return dataclasses.replace(self, data=dataclasses.replace(self.data, seq_len=seq_len), train=train)

    @property
    def contexts(self) -> list[tuple[int, int]]:
        """Returns (first step from 0, sequence length) of each segment of the run (resolved configs only)."""
        lengths = [*(seq_len for seq_len, _ in self.data.seq_len_schedule), self.data.seq_len]
        return list(zip(self._first_steps(self.data.seq_len_schedule), lengths, strict=True))

    @property
    def source_stages(self) -> tuple[tuple[int, tuple[float, ...]], ...]:
        """Returns (first step from 0, weights of the sources) of each stage of the mixture (resolved configs only).

        Without `data.sources_schedule` it is empty.
        """
        schedule = self.data.sources_schedule
        if not schedule:
            return ()
        weights = [*(weights for weights, _ in schedule), tuple(weight for _, weight in self.data.sources)]
        return tuple(zip(self._first_steps(schedule), weights, strict=True))

    def _first_steps(self, schedule: tuple[tuple[Any, float], ...]) -> list[int]:
        return [0, *(round(fraction * self.train.num_steps) for _, fraction in schedule)]

    def context_at(self, step: int) -> int:
        """Returns the sequence length at `step`, counted from 0 (resolved configs only)."""
        return [seq_len for first_step, seq_len in self.contexts if first_step <= step][-1]

    @property
    def accumulation(self) -> int:
        """Returns the number of micro-batches per optimizer step (resolved configs only)."""
        return self.train.global_batch_size // (self.train.per_device_batch_size * self.batch_shards)

    @property
    def loss_chunk(self) -> int:
        """Returns the number of positions of each row in a chunk of the loss (resolved configs only)."""
        return max(1, min(self.data.seq_len, self.train.loss_chunk_tokens // self.train.per_device_batch_size))

    @property
    def rounds(self) -> int:
        """Returns the number of model calls per optimizer step. A pipeline processes all micro-batches in one call."""
        return self.accumulation if self.mesh.stage == 1 else 1


# Fields of `Config` that are no sections.
MODELS = ('teacher', 'scorer')
# The class of each section, which is the default factory of its field.
SECTIONS: dict[str, Any] = {
    field.name: field.default_factory for field in dataclasses.fields(Config) if field.name not in MODELS
}
