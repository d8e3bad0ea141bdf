"""Config keys of the optimizer, and of the guard against loss spikes and overruns."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from maxlm.config.sections.declaration import FunctionName, Renamed, ValueBefore
from maxlm.config.sections.ranges import Epsilon, Fraction, FractionAbove0, FractionBelow1, Range, Steps, StepsFrom1

# All published recipes use learning rates far below 1.
LearningRate = Annotated[float, Range(0, 100)]


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    # Optimizer. muon, soap: Muon or SOAP (Vyas et al. 2024) on the matrices of the blocks, AdamW on all other
    # parameters; or a function of your own (docs/tutorials/optimizer.md).
    name: Literal['adamw', 'muon', 'soap'] | FunctionName = 'adamw'
    # Peak learning rate; for muon, that of the matrices.
    learning_rate: Annotated[float, Range(0, 100, above=True)] = 3e-4
    # muon: peak learning rate of the AdamW parameters (embeddings, head, scales, biases); 0 = learning_rate.
    adam_learning_rate: LearningRate = 0.0
    # Peak learning rate of the embedding tables; 0 = that of AdamW.
    embedding_learning_rate: LearningRate = 0.0
    # Schedule after a linear warm-up. wsd: stable, then linear decay. A function of your own returns the complete
    # schedule (docs/tutorials/optimizer.md).
    schedule: Literal['cosine', 'linear', 'wsd', 'constant'] | FunctionName = 'cosine'
    # wsd: fraction of the run used for the decay, at its end.
    wsd_decay_fraction: Annotated[FractionAbove0, Renamed('decay_fraction')] = 0.2
    # Length of the warm-up, in steps or in tokens.
    warmup_steps: Steps = 0
    warmup_tokens: Annotated[int, Range(0, 10**18)] = 0
    # Update n = 0, 1, … of the warm-up has (n + 1) / warmup_steps of the peak rate; true: n / warmup_steps, so the
    # first update changes nothing.
    warmup_from_zero: Annotated[bool, ValueBefore(True)] = False
    # Final learning rate of cosine, linear and wsd for the peak learning_rate; it scales with the other peaks.
    min_learning_rate: LearningRate = 0.0
    beta1: FractionBelow1 = 0.9
    beta2: FractionBelow1 = 0.95
    # Storage of the moments. int8: block-wise (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization").
    moment_dtype: Annotated[Literal['float32', 'bfloat16', 'int8'], Renamed('moments')] = 'float32'
    # Added to the square root of the second moment.
    eps: Annotated[Epsilon, Renamed('epsilon')] = 1e-8
    # muon: Nesterov momentum, and the number of steps over which it rises from 0.85 to that value.
    muon_momentum: Annotated[FractionBelow1, Renamed('momentum')] = 0.95
    muon_momentum_warmup_steps: Annotated[Steps, Renamed('momentum_warmup_steps')] = 0
    # muon: momentum at the end of the run, which it approaches linearly while the schedule decays; 0 = muon_momentum.
    # The warm-up of the momentum comes first.
    muon_final_momentum: FractionBelow1 = 0.0
    # muon: coefficients of the five iterations that orthogonalize. newton_schulz: Jordan et al. 2024, "Muon";
    # polar_express: Amsel et al. 2025, "The Polar Express".
    muon_coefficients: Literal['newton_schulz', 'polar_express'] = 'newton_schulz'
    # muon: scale the rows of each matrix, which are its outputs, to the same norm before the iterations (MuonEq).
    muon_row_equilibration: bool = False
    # muon: scale each result to the Frobenius norm of an orthogonal matrix, √min(inputs, outputs) (Muon+).
    muon_renormalize: bool = False
    # muon: divide each row of the result by the root of a moving average of its mean square; with more columns than
    # rows, each column (Li et al. 2025, "NorMuon"). This is the decay of the average; 0 = off.
    muon_beta2: FractionBelow1 = 0.0
    # muon: multiply the weight decay of a matrix by √max(1, outputs / inputs), as its update.
    muon_scaled_decay: bool = False
    # Decoupled weight decay.
    weight_decay: Annotated[float, Range(0, 10)] = 0.1
    # Parameters with weight decay. matrices: with embeddings; projections: matrices without embeddings and head; all:
    # with scales and biases.
    weight_decay_mask: Literal['matrices', 'projections', 'all'] = 'matrices'
    # Decay only the elements that the update moves toward 0 (Chen et al. 2025, "Cautious Weight Decay").
    cautious_decay: bool = False
    # Factor of the weight decay. cosine: half a cosine from 1 at the first step to 0 at the end of the run.
    weight_decay_schedule: Literal['constant', 'cosine'] = 'constant'
    # Settings of some parameters: (('embedding', 'learning_rate=0.3', 'beta2=0.995'), ('*.bias', 'weight_decay=0')).
    # A pattern of dotted names, then learning_rate (the peak) or learning_rate_ratio, beta1, beta2, eps, weight_decay
    # (despite the mask), cautious_decay and weight_decay_schedule. The first pattern that matches a parameter applies.
    groups: tuple = ()
    # Parameters that are not trained, as patterns of dotted names: ('embedding', 'blocks.attention.*').
    frozen_params: Annotated[tuple, Renamed('frozen')] = ()
    # Parameters trained despite frozen_params or despite adapters: ('embedding', 'head.*').
    trainable_params: Annotated[tuple, Renamed('trained')] = ()
    # Maximum global norm of the gradient; 0 = no clipping.
    max_grad_norm: Annotated[float, Range(0, 1e9), Renamed('clip_norm')] = 1.0
    # Decay per step of the exponential moving average of the parameters, which is then used for evaluation and
    # inference; 0 = off. At update n the decay is at most (1 + n) / (10 + n).
    ema_decay: FractionBelow1 = 0.0

    @property
    def is_function(self) -> bool:
        """True if the optimizer is a function: one of the user, or soap, which is written as one."""
        return self.name == 'soap' or ':' in self.name


@dataclasses.dataclass(frozen=True)
class GuardConfig:
    # Number of recent good steps used to detect loss and gradient-norm spikes. Steps with spikes are skipped, from 16
    # good steps on; until the window is full, the threshold is higher. The devices sort it at every step. 0 = skip only
    # non-finite steps. With train.objective=grpo, 128 also means 0.
    spike_window: Annotated[int, Range(0, 2**16), Renamed('window')] = 128
    # Robust standard deviations above the median from which on a step counts as a spike.
    spike_threshold: Annotated[float, Range(0, 1e6, above=True), Renamed('spike_deviations')] = 10.0
    # Number of consecutive steps with a spike or a non-finite value after which the run rolls back or, after
    # max_rollbacks rollbacks, stops with exit code 1. Each of these steps is skipped.
    max_consecutive_skips: Annotated[StepsFrom1, Renamed('train.max_skipped_steps')] = 20
    # Maximum number of rollbacks to a checkpoint before the bad steps. A rollback skips their batches. 0 = stop. With
    # train.objective=grpo, 2 also means 0.
    max_rollbacks: Annotated[int, Range(0, 10**5)] = 2
    # Number of steps before the first bad step whose batches are also skipped after a rollback.
    rollback_skip_steps: Annotated[Steps, Renamed('rollback_margin')] = 20
    # Factor that a rollback applies to all learning rates; 1 = unchanged.
    rollback_lr_factor: Annotated[FractionAbove0, Renamed('rollback_rate_factor')] = 1.0
    # Fraction of the steps that are computed twice from the same state and batch, to detect devices that compute wrong
    # results. Recommended: 0.0025. The first of several steps with a spike or a non-finite value is always computed
    # twice.
    replay_fraction: Fraction = 0.0
    # Number of evaluations without a lower validation loss after which the run ends (exit code 0); 0 = never.
    early_stopping_patience: Annotated[Steps, Renamed('patience')] = 0
    # Minimum decrease of the validation loss that counts as an improvement.
    early_stopping_min_delta: Annotated[float, Range(0, 1e6), Renamed('min_delta')] = 0.0
    # Cost limit of all attempts of the run. At the limit, the run saves its state and ends (exit code 0).
    # 0 = unlimited.
    max_hours: Annotated[float, Range(0, 1e5)] = 0.0
    max_dollars: Annotated[float, Range(0, 1e10)] = 0.0
