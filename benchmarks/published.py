"""Published throughputs of other systems, each as a maxlm config, for calibrating the model of step times.

Comments mark the settings that a source does not state. All systems use a fused causal attention kernel, so
`isolate_documents` is off. Logits are not chunked, because the other systems do not chunk them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

from maxlm.config.loading import build, default
from maxlm.config.resolve import resolve
from maxlm.config.schema import Config
from maxlm.hardware.chips import CHIPS, Chip
from maxlm.training.flops import training_flops


class Published(NamedTuple):
    """One measured configuration.

    Attributes:
        source: origin of the measurement; points with a common source may share errors.
        config: resolved config.
        num_islands: number of nodes or slices.
        is_fused: elementwise operations are fused by a compiler or by hand. Unfused PyTorch needs more memory traffic.
    """

    source: str
    name: str
    config: Config
    chip: Chip
    num_devices: int
    num_islands: int
    tokens_per_second: float
    is_fused: bool

    @property
    def seconds(self) -> float:
        """Returns the seconds of one step."""
        return self.config.train.global_batch_size * self.config.data.seq_len / self.tokens_per_second


def published() -> list[Published]:
    """Returns all published points."""
    return [*_foundry(), *_maxtext_tpu(), *_maxtext_gpu(), *_others()]


def find_published_chip(name: str, **changes: Any) -> Chip:
    """Returns a chip of the table, with changed fields such as the network bandwidth."""
    (chip, *_) = (chip for chip in CHIPS if chip.name == name)
    return dataclasses.replace(chip, **changes)


def make_config(
    model: dict[str, Any],
    *,
    platform: str,
    window: int,
    micro_batch: int,
    accumulation: int = 1,
    mesh: dict[str, int],
    optimizer: dict[str, Any] | None = None,
) -> Config:
    """Returns a resolved config; `micro_batch` is per device, or per group of devices along the tensor axis."""
    values = default()
    num_devices = math.prod(size for axis, size in mesh.items() if axis != 'zero_stage')
    shards = num_devices // mesh.get('tensor', 1)
    for key, value in model.items():
        values.model[key] = value
    for key, value in mesh.items():
        values.mesh[key] = value
    for key, value in (optimizer or {}).items():
        values.optimizer[key] = value
    if 'fsdp' not in mesh:
        values.mesh.fsdp = 1
    values.data.seq_len = window
    values.data.document_mask = False
    values.train.num_steps = 1
    values.train.loss_chunk_tokens = window * micro_batch
    values.train.per_device_batch_size = micro_batch
    values.train.global_batch_size = micro_batch * accumulation * shards
    config = resolve(
        build(values), platform=platform, num_devices=num_devices, vocab_size=model['vocab_size'], windows=1
    )
    # Other systems have fused kernels on TPUs and for larger heads too.
    return dataclasses.replace(config, model=dataclasses.replace(config.model, attention='cudnn'))


# MPT model → (layers, width, heads)
_MPT = {
    '125m': (12, 768, 12),
    '350m': (24, 1024, 16),
    '760m': (24, 1536, 12),
    '1b': (24, 2048, 16),
    '3b': (32, 2560, 20),
    '7b': (32, 4096, 32),
    '13b': (40, 5120, 40),
    '30b': (48, 7168, 56),
    '70b': (80, 8192, 64),
}
# MosaicML, llm-foundry, scripts/train/benchmarking/README.md: FSDP over all GPUs, bfloat16. Contains most rows up to
# 8192 tokens; longer ones depend on an attention kernel that is no longer used. Columns: model, sequence length, GPUs,
# micro-batch per GPU, accumulation, recomputation of blocks, tokens/s per GPU.
_FOUNDRY = {
    'h100': (
        ('70b', 2048, 64, 8, 4, True, 1039),
        ('70b', 2048, 32, 2, 16, True, 882),
        ('30b', 8192, 8, 1, 21, True, 1384),
        ('30b', 4096, 8, 1, 21, True, 1802),
        ('30b', 2048, 32, 14, 3, True, 2308),
        ('30b', 2048, 16, 10, 3, True, 2263),
        ('30b', 2048, 8, 3, 21, True, 2002),
        ('30b', 1024, 8, 6, 21, True, 2084),
        ('13b', 4096, 8, 10, 3, True, 4717),
        ('13b', 2048, 64, 2, 1, False, 4800),
        ('13b', 2048, 32, 2, 1, False, 4811),
        ('13b', 2048, 16, 2, 1, False, 4767),
        ('13b', 2048, 8, 2, 1, False, 4792),
        ('13b', 1024, 8, 40, 3, True, 5502),
        ('7b', 8192, 8, 8, 2, True, 6935),
        ('7b', 4096, 8, 16, 2, True, 8611),
        ('7b', 2048, 8, 6, 1, False, 10643),
        ('7b', 1024, 8, 64, 2, True, 10203),
        ('3b', 8192, 8, 3, 6, False, 16578),
        ('3b', 4096, 8, 5, 6, False, 20964),
        ('3b', 2048, 64, 6, 3, False, 22525),
        ('3b', 2048, 32, 6, 3, False, 23021),
        ('3b', 2048, 16, 10, 3, False, 24142),
        ('3b', 1024, 8, 20, 6, False, 27046),
        ('3b', 512, 8, 40, 6, False, 27965),
        ('1b', 8192, 8, 3, 4, False, 29157),
        ('1b', 4096, 8, 7, 4, False, 38535),
        ('1b', 2048, 64, 20, 1, False, 44402),
        ('1b', 2048, 32, 20, 1, False, 45130),
        ('1b', 2048, 16, 20, 1, False, 46037),
        ('1b', 2048, 8, 14, 1, False, 45455),
        ('1b', 1024, 8, 18, 4, False, 48910),
        ('1b', 512, 8, 56, 4, False, 52275),
        ('760m', 8192, 8, 6, 2, False, 41825),
        ('760m', 4096, 8, 12, 2, False, 55459),
        ('760m', 2048, 32, 24, 1, False, 67971),
        ('760m', 2048, 16, 24, 1, False, 68551),
        ('760m', 2048, 8, 24, 2, False, 63147),
        ('760m', 1024, 8, 48, 2, False, 78581),
        ('760m', 512, 8, 96, 2, False, 83749),
    ),
    'a100': (
        ('70b', 2048, 64, 8, 4, True, 410),
        ('70b', 2048, 32, 2, 16, True, 373),
        ('30b', 8192, 8, 1, 21, True, 574),
        ('30b', 4096, 8, 1, 21, True, 814),
        ('30b', 2048, 8, 3, 21, True, 916),
        ('30b', 1024, 8, 6, 21, True, 946),
        ('30b', 512, 8, 12, 21, True, 967),
        ('13b', 8192, 8, 5, 3, True, 1795),
        ('13b', 4096, 8, 10, 3, True, 2060),
        ('13b', 2048, 8, 2, 3, False, 2262),
        ('13b', 1024, 8, 40, 3, True, 2330),
        ('7b', 8192, 8, 8, 2, True, 3206),
        ('7b', 4096, 8, 16, 2, True, 3684),
        ('7b', 2048, 8, 6, 2, False, 4641),
        ('7b', 1024, 8, 64, 2, True, 4357),
        ('3b', 8192, 8, 3, 6, False, 7695),
        ('3b', 4096, 8, 5, 6, False, 9457),
        ('3b', 2048, 8, 10, 2, False, 10811),
        ('3b', 1024, 8, 20, 6, False, 11580),
        ('3b', 512, 8, 40, 6, False, 12127),
        ('1b', 8192, 8, 3, 4, False, 13814),
        ('1b', 4096, 8, 7, 4, False, 17807),
        ('1b', 2048, 8, 14, 4, False, 20513),
        ('1b', 1024, 8, 18, 4, False, 22112),
        ('1b', 512, 8, 56, 4, False, 23148),
        ('760m', 8192, 8, 6, 2, False, 20933),
        ('760m', 4096, 8, 12, 2, False, 27351),
        ('760m', 2048, 8, 24, 2, False, 32434),
        ('760m', 1024, 8, 48, 2, False, 29765),
        ('760m', 512, 8, 96, 2, False, 29446),
        ('350m', 8192, 8, 8, 2, False, 36569),
        ('350m', 4096, 8, 16, 2, False, 49555),
        ('350m', 2048, 8, 32, 2, False, 58782),
        ('350m', 1024, 8, 64, 2, False, 64813),
        ('350m', 512, 8, 128, 2, False, 69330),
        ('125m', 8192, 8, 8, 2, False, 90392),
        ('125m', 4096, 8, 16, 2, False, 118396),
        ('125m', 2048, 8, 32, 2, False, 141737),
        ('125m', 1024, 8, 64, 2, False, 156468),
        ('125m', 512, 8, 128, 2, False, 165681),
    ),
    'a100-40': (
        ('70b', 2048, 128, 4, 1, True, 376),
        ('70b', 2048, 64, 2, 1, True, 276),
        ('30b', 2048, 128, 6, 1, True, 865),
        ('30b', 2048, 32, 4, 1, True, 857),
        ('13b', 2048, 128, 16, 1, True, 1972),
        ('13b', 2048, 32, 14, 1, True, 1998),
        ('13b', 2048, 8, 4, 16, True, 1668),
        ('7b', 8192, 8, 3, 4, True, 2887),
        ('7b', 2048, 128, 18, 1, True, 3623),
        ('7b', 2048, 32, 18, 1, True, 3725),
        ('7b', 2048, 8, 12, 4, True, 3679),
        ('3b', 4096, 8, 2, 8, False, 8777),
        ('3b', 2048, 128, 6, 1, False, 9538),
    ),
}


def _foundry() -> list[Published]:
    points = []
    for chip, rows in _FOUNDRY.items():
        for name, window, gpus, micro_batch, accumulation, remat, speed in rows:
            num_layers, dim, num_heads = _MPT[name]
            model = {
                'family': 'gpt2',
                'use_bias': False,
                'vocab_size': 50_368,
                'num_layers': num_layers,
                'dim': dim,
                'num_heads': num_heads,
                'remat_policy': 'full' if remat else 'none',
            }
            config = make_config(
                model,
                platform='gpu',
                window=window,
                micro_batch=micro_batch,
                accumulation=accumulation,
                mesh={'fsdp': gpus},
            )
            label = f'MPT-{name} window {window} on {gpus} {chip}'
            chip_of = find_published_chip(chip)
            points.append(
                Published('llm-foundry', label, config, chip_of, gpus, max(1, gpus // 8), speed * gpus, False)
            )
    return points


def _llama(num_layers: int, dim: int, num_heads: int, ffn_dim: int, vocab_size: int, **others: Any) -> dict[str, Any]:
    shape = {'num_layers': num_layers, 'dim': dim, 'num_heads': num_heads, 'ffn_dim': ffn_dim, 'vocab_size': vocab_size}
    return {'family': 'llama', **shape, **others}


def _from_tflops(tflops: float, config: Config, num_devices: int) -> float:
    """Returns tokens per second from model TFLOP/s per device, with attention counted without causal mask."""
    return tflops * 1e12 * num_devices / training_flops(config.model, config.data.seq_len).full


# MaxText, MaxText/configs/{v4,v5e,v5p}: README.md and scripts. Shapes follow its scaling of 16 layers, width 2048, 16
# heads of 256 and feed-forward width 7168 (SwiGLU). Shapes on v4 are as stated, with two feed-forward matrices.
# Columns: name, model, micro-batch per chip, tensor axis, chips per slice, policy, TFLOP/s per chip by slices.
_WIDE = {'head_dim': 256}
_MAXTEXT_TPU = (
    ('v4', '22B', 13, 1, 64, 'full', {1: 156, 2: 152, 4: 149, 8: 146}),
    ('v4', '52B', 7, 1, 192, 'full', {1: 154, 2: 162}),
    ('v5e', '16B', 6, 1, 256, 'full', {1: 120, 2: 117, 4: 117, 8: 115, 16: 111, 32: 108}),
    ('v5e', '32B', 4, 1, 256, 'full', {1: 132, 2: 128, 4: 126, 8: 125, 16: 123, 32: 119}),
    ('v5e', '64B', 2, 1, 256, 'full', {1: 118, 2: 112, 4: 110, 8: 108, 16: 105, 32: 99}),
    ('v5p', '32B', 7, 4, 64, 'dots_no_batch', {1: 328}),
    ('v5p', '64B', 3, 4, 64, 'dots_no_batch', {1: 323}),
    ('v5p', '128B', 1, 8, 128, 'dots_no_batch', {1: 315}),
    ('v5p', '128B', 1, 8, 256, 'dots_no_batch', {1: 315}),
)
_MAXTEXT_MODELS: dict[str, dict[str, Any]] = {
    '22B': _llama(48, 6144, 24, 24_576, 32_000, activation='relu2', **_WIDE),
    '52B': _llama(32, 12_288, 32, 49_152, 32_000, activation='relu2', **_WIDE),
    '16B': _llama(32, 4096, 64, 28_672, 32_000, **_WIDE),
    '32B': _llama(32, 8192, 64, 28_672, 32_000, **_WIDE),
    '64B': _llama(64, 8192, 64, 28_672, 32_000, **_WIDE),
    '128B': _llama(64, 8192, 128, 57_344, 32_000, **_WIDE),
}


def _maxtext_tpu() -> list[Published]:
    points = []
    for chip, name, per_chip, tensor, chips, remat, by_slices in _MAXTEXT_TPU:
        for slices, tflops in by_slices.items():
            config = make_config(
                {**_MAXTEXT_MODELS[name], 'remat_policy': remat},
                platform='tpu',
                window=2048,
                micro_batch=per_chip * tensor,
                mesh={'replica': slices, 'fsdp': chips // tensor, 'tensor': tensor},
            )
            speed = _from_tflops(tflops, config, chips * slices)
            label = f'MaxText {name} on {slices} × {chips} {chip}'
            points.append(
                Published(
                    f'MaxText {chip}', label, config, find_published_chip(chip), chips * slices, slices, speed, True
                )
            )
    return points


def _maxtext_gpu() -> list[Published]:
    """Returns the points of MaxText/configs/a3/llama_2_7b: nodes of 8 H100 with 200 Gb/s per GPU."""
    points = []
    for nodes, tflops in {1: 492, 2: 422, 4: 407, 8: 409, 16: 375}.items():
        config = make_config(
            _llama(32, 4096, 32, 11_008, 32_000, remat_policy='dots_no_batch'),
            platform='gpu',
            window=4096,
            micro_batch=4,
            mesh={'replica': nodes, 'fsdp': 8},
        )
        speed = _from_tflops(tflops, config, 8 * nodes)
        chip = find_published_chip('h100', network_bandwidth=25e9)
        points.append(
            Published(
                'MaxText h100', f'MaxText Llama2-7B on {nodes} × 8 h100', config, chip, 8 * nodes, nodes, speed, True
            )
        )
    return points


def _others() -> list[Published]:
    h100, a100 = find_published_chip('h100'), find_published_chip('a100')
    llama3_8b = make_config(
        _llama(32, 4096, 32, 14_336, 128_256, num_kv_heads=8),
        platform='gpu',
        window=8192,
        # The source uses 16 micro-batches of 1 and reduces their gradients once, like one micro-batch of 16. It shards
        # the optimizer state; its context parallelism of 2 is omitted.
        micro_batch=16,
        mesh={'fsdp': 8, 'zero_stage': 1},
    )
    olmo_1b = make_config(
        # The source states no layout; 4 sequences on each of 8 GPUs are assumed.
        _llama(16, 2048, 16, 8192, 100_352, qk_norm=True),
        platform='gpu',
        window=4096,
        micro_batch=4,
        accumulation=4,
        mesh={'fsdp': 8},
    )
    gpt2_xl = make_config(
        {'family': 'gpt2', 'num_layers': 48, 'dim': 1600, 'num_heads': 25, 'vocab_size': 50_304},
        platform='gpu',
        window=1024,
        # The source uses 8 micro-batches of 16 and reduces their gradients once.
        micro_batch=128,
        mesh={'fsdp': 8, 'zero_stage': 1},
    )
    d20 = make_config(
        {
            'family': 'nanochat',
            'num_layers': 20,
            'dim': 1280,
            'num_heads': 10,
            'ffn_dim': 5120,
            'vocab_size': 65_536,
        },
        platform='gpu',
        window=2048,
        micro_batch=32,
        mesh={'fsdp': 8, 'zero_stage': 1},
        optimizer={'name': 'muon'},
    )
    tiny_llama = make_config(
        _llama(22, 2048, 32, 5632, 32_000, num_kv_heads=4),
        platform='gpu',
        window=2048,
        micro_batch=8,
        accumulation=8,
        mesh={'replica': 2, 'fsdp': 8},
    )
    llama2_13b = make_config(
        _llama(40, 5120, 40, 13_824, 32_000), platform='gpu', window=4096, micro_batch=2, mesh={'fsdp': 64}
    )
    llama3_70b = make_config(
        _llama(80, 8192, 64, 28_672, 128_256, num_kv_heads=8, remat_policy='full'),
        platform='gpu',
        window=8192,
        micro_batch=1,
        mesh={'fsdp': 64},
    )
    llama2_70b = make_config(
        _llama(80, 8192, 64, 28_672, 32_000, num_kv_heads=8, remat_policy='full'),
        platform='gpu',
        window=4096,
        micro_batch=2,
        mesh={'fsdp': 64},
    )
    a100_40 = find_published_chip('a100-40')
    return [
        # The first four values come from secondary sources. NVIDIA, DGX Cloud benchmarking recipes.
        Published('NeMo', 'Llama3.1-8B', llama3_8b, h100, 8, 1, 10_254 * 8, True),
        # Ai2, OLMo-core.
        Published('OLMo-core', 'OLMo2-1B', olmo_1b, h100, 8, 1, 55_000 * 8, True),
        # Karpathy 2024, llm.c discussion 677: 374 to 388 thousand tokens/s.
        Published('llm.c', 'GPT-2 1.56B', gpt2_xl, h100, 8, 1, 381_000, True),
        # Karpathy 2025, nanochat: 50 % MFU, with attention counted without causal mask.
        Published('nanochat', 'd20', d20, h100, 8, 1, _from_tflops(0.50 * 989.4, d20, 8), True),
        # Zhang et al. 2024, "TinyLlama", README.md.
        Published('TinyLlama', 'TinyLlama-1.1B', tiny_llama, a100_40, 16, 2, 24_000 * 16, True),
        # torchtitan, docs/performance.md, mid-2024, 64 A100 80 GB.
        Published('torchtitan', 'Llama2-13B', llama2_13b, a100, 64, 8, 2162 * 64, False),
        Published('torchtitan', 'Llama3-70B', llama3_70b, a100, 64, 8, 331 * 64, False),
        Published('torchtitan', 'Llama2-70B', llama2_70b, a100, 64, 8, 353 * 64, False),
    ]
