"""Mixture-of-experts models from 8M to 31B parameters, of which each token uses a part.

Command:   maxlm prepare --input=TEXT --output=data/moe --tokenizer=bpe:32000
           maxlm train --config=configs/moe.py:8x1b --workdir=runs/moe-8x1b
Variants:  tiny: configs/tiny.py with a shared expert and 4 experts, 1 per token, of half the feed-forward width each,
           so a token needs the same operations;
           8x1b: Llama 3.2 1B with 8 experts, 2 per token, each of the width of its feed-forward;
           16b-a3b: Moonlight 16B-A3B without latent attention: 64 experts, 6 per token, 2 shared experts, sigmoid
           scores and a bias that balances the loads (DeepSeekMoE); the first layer is dense;
           30b-a3b: Qwen3-30B-A3B: 128 experts, 8 per token
Hardware:  tiny: any CPU with 2 cores. Others: 8 × H100 80 GB for 8x1b, 16 for 16b-a3b and 32 for 30b-a3b, with
           pip install 'maxlm[experts]'; or 32 × TPU v5p, 64 for 30b-a3b. On TPU, 8x1b is planned with
           --config.model.remat_policy=none --config.train.per_device_batch_size=4
Time:      tiny: about four minutes. Others: 100 billion tokens, 4.2M per step; planned for these numbers of H100
           (TPU): 118 (42) hours for 8x1b, 92 (72) for 16b-a3b, 75 (58) for 30b-a3b
Cost:      planned: $3,800 ($5,700) for 8x1b, $5,900 ($9,700) for 16b-a3b, $9,600 ($15,700) for 30b-a3b
Memory:    planned, GiB per H100 (TPU): 50 (68) for 8x1b, 44 (34) for 16b-a3b, 45 (36) for 30b-a3b
Expected:  tiny: validation loss of 4.77 nats per token on the data of configs/tiny.py, which reaches 4.81 (mean of
           three seeds). Others: speed and loss are not measured yet; the planned MFU on H100 is 39 % for 8x1b, 33 %
           for 16b-a3b and 27 % for 30b-a3b

All plans are estimates by formula; docs/models.md has the table.
"""

from ml_collections import ConfigDict

from maxlm.config.loading import default
from maxlm.errors import InputError

VARIANTS = ('tiny', '8x1b', '16b-a3b', '30b-a3b')


def get_config(variant: str = 'tiny') -> ConfigDict:
    if variant not in VARIANTS:
        raise InputError(f'configs/moe.py has no variant {variant!r}; there are: {", ".join(VARIANTS)}')
    config = default()
    if variant == 'tiny':
        return _tiny(config)
    model = config.model
    if variant == '8x1b':
        _set(model, family='llama', vocab_size=128_256, num_layers=16, dim=2048, num_heads=32, num_kv_heads=8)
        _set(model, num_experts=8, num_experts_per_token=2, expert_ffn_dim=8192)
        _set(model, rope_theta=500_000.0, tie_embeddings=True)
    elif variant == '16b-a3b':
        _set(model, family='llama', vocab_size=163_840, num_layers=27, dim=2048, num_heads=16, ffn_dim=11_264)
        _set(model, num_experts=64, num_experts_per_token=6, expert_ffn_dim=1408)
        _set(model, num_shared_experts=2, num_dense_layers=1, rope_theta=50_000.0)
        _set(model, router_score='sigmoid', router_balance_bias=True, routed_scaling_factor=2.446)
    else:
        _set(model, family='qwen3', vocab_size=151_936, num_layers=48, dim=2048, num_heads=32, num_kv_heads=4)
        _set(model, head_dim=128, num_experts=128, num_experts_per_token=8, expert_ffn_dim=768)
    model.remat_policy = 'full'
    # Every device has all experts of a layer while it computes the layer. The plan for H100 with mesh.expert=2 takes 14
    # to 50 % longer, because the arrays of exchanged rows have the largest possible number of rows.
    config.mesh.fsdp = -1
    config.mesh.zero_stage = 2 if variant == '8x1b' else 3

    config.data.path = 'data/moe'
    config.data.seq_len = 4096

    config.train.num_tokens = 100_000_000_000
    config.train.global_batch_size = 1024
    config.train.per_device_batch_size = 16
    # The balance bias replaces most of the load-balancing loss (DeepSeek-AI 2024, "DeepSeek-V3": 1e-4).
    config.train.load_balancing_loss = 1e-4 if variant == '16b-a3b' else 1e-3
    config.train.router_z_loss = 1e-3

    config.eval.interval = 500
    config.eval.num_batches = 4
    config.eval.num_samples = 4

    config.optimizer.learning_rate = 3e-4
    config.optimizer.min_learning_rate = 3e-5
    config.optimizer.warmup_steps = 500
    config.optimizer.max_grad_norm = 1.0

    config.checkpoint.save_interval_steps = 250
    config.checkpoint.max_to_keep = 2
    config.export.at_end = True
    return config


def _set(section: ConfigDict, **values: object) -> None:
    section.update(values)


def _tiny(config: ConfigDict) -> ConfigDict:
    """Returns the settings of configs/tiny.py with experts."""
    _set(config.model, family='llama', num_layers=4, dim=256, num_heads=4, dtype='float32', scan_layers=False)
    _set(config.model, num_experts=4, num_experts_per_token=1, num_shared_experts=1, expert_ffn_dim=352)
    # A weight of about 1 at the start: twice the sigmoid of 0.
    _set(config.model, router_score='sigmoid', router_normalize=False, routed_scaling_factor=2.0, tie_embeddings=True)
    config.data.seq_len = 256
    _set(config.train, num_steps=400, global_batch_size=8, log_every=10)
    _set(config.eval, interval=100, num_batches=16, num_samples=2, sample_max_tokens=48)
    _set(config.optimizer, learning_rate=2e-3, min_learning_rate=2e-4, warmup_steps=40)
    _set(config.checkpoint, save_interval_steps=100, max_to_keep=2)
    return config
