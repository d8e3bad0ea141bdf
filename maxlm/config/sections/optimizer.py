"""Config keys of the optimizer, and of the guard against loss spikes and overruns."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    # Optimizer: adamw | muon (Muon on the matrices of the blocks, AdamW on all other parameters) | a function of your
    # own, as module:function (docs/tutorials/optimizer.md).
    name: str = 'adamw'
    # Peak learning rate; for muon, that of the matrices.
    learning_rate: float = 3e-4
    # muon: peak learning rate of the AdamW parameters (embeddings, head, scales, biases); 0 = learning_rate.
    adam_learning_rate: float = 0.0
    # Peak learning rate of the embedding tables; 0 = that of AdamW.
    embedding_learning_rate: float = 0.0
    # Schedule after a linear warm-up from 0: cosine | linear | wsd (stable, then linear decay) | constant | a function
    # of your own, as module:function, which returns the complete schedule (docs/tutorials/optimizer.md).
    schedule: str = 'cosine'
    # wsd: fraction of the run used for the decay, at its end.
    wsd_decay_fraction: float = 0.2
    # Length of the warm-up, in steps or in tokens.
    warmup_steps: int = 0
    warmup_tokens: int = 0
    # Final learning rate of cosine, linear and wsd for the peak learning_rate; it scales with the other peaks.
    min_learning_rate: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    # Storage of the moments: float32 | bfloat16 | int8 (block-wise: Dettmers et al. 2022, "8-bit Optimizers via
    # Block-wise Quantization").
    moment_dtype: str = 'float32'
    # Added to the square root of the second moment.
    eps: float = 1e-8
    # muon: Nesterov momentum, and the number of steps over which it rises from 0.85 to that value.
    muon_momentum: float = 0.95
    muon_momentum_warmup_steps: int = 0
    # Decoupled weight decay.
    weight_decay: float = 0.1
    # Parameters with weight decay: matrices (with embeddings) | projections (matrices without embeddings and head) |
    # all (with scales and biases).
    weight_decay_mask: str = 'matrices'
    # Parameters that are not trained, as patterns of dotted names: ('embedding', 'blocks.attention.*').
    frozen_params: tuple = ()
    # Parameters trained despite frozen_params or despite adapters: ('embedding', 'head.*').
    trainable_params: tuple = ()
    # Maximum global norm of the gradient; 0 = no clipping.
    max_grad_norm: float = 1.0
    # Decay per step of the exponential moving average of the parameters, which is then used for evaluation and
    # inference; 0 = off. At update n the decay is at most (1 + n) / (10 + n).
    ema_decay: float = 0.0


@dataclasses.dataclass(frozen=True)
class GuardConfig:
    # Number of recent good steps used to detect loss and gradient-norm spikes. Steps with spikes are skipped, from 16
    # good steps on; until the window is full, the threshold is higher. 0 = skip only non-finite steps. With
    # train.objective=grpo, 128 also means 0.
    spike_window: int = 128
    # Robust standard deviations above the median from which on a step counts as a spike.
    spike_threshold: float = 10.0
    # Number of consecutive steps with a spike or a non-finite value after which the run rolls back or, after
    # max_rollbacks rollbacks, stops with exit code 1. Each of these steps is skipped.
    max_consecutive_skips: int = 20
    # Maximum number of rollbacks to a checkpoint before the bad steps. A rollback skips their batches. 0 = stop. With
    # train.objective=grpo, 2 also means 0.
    max_rollbacks: int = 2
    # Number of steps before the first bad step whose batches are also skipped after a rollback.
    rollback_skip_steps: int = 20
    # Factor that a rollback applies to all learning rates; 1 = unchanged.
    rollback_lr_factor: float = 1.0
    # Fraction of the steps that are computed twice from the same state and batch, to detect devices that compute wrong
    # results. Recommended: 0.0025. The first of several steps with a spike or a non-finite value is always computed
    # twice.
    replay_fraction: float = 0.0
    # Number of evaluations without a lower validation loss after which the run ends (exit code 0); 0 = never.
    early_stopping_patience: int = 0
    # Minimum decrease of the validation loss that counts as an improvement.
    early_stopping_min_delta: float = 0.0
    # Cost limit of all attempts of the run. At the limit, the run saves its state and ends (exit code 0).
    # 0 = unlimited.
    max_hours: float = 0.0
    max_dollars: float = 0.0
