"""Config keys of the optimizer and its learning rate."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    # Optimizer: adamw | muon (Muon on the matrices of the blocks, AdamW on all other parameters).
    name: str = 'adamw'
    # Peak learning rate; for muon, that of the matrices.
    learning_rate: float = 3e-4
    # muon: peak learning rate of the AdamW parameters (embeddings, head, scales, biases); 0 = learning_rate.
    adam_learning_rate: float = 0.0
    # Peak learning rate of the embedding tables; 0 = that of AdamW.
    embedding_learning_rate: float = 0.0
    # Schedule after a linear warm-up from 0: cosine | linear | wsd (stable, then linear decay) | constant.
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
