"""Contents of the files of a run as functions of the step, for `tests.workdirs`."""

import math

from maxlm.config.loading import build, default
from maxlm.formatting import GIB

NOW = 1_760_000_000.0
NUM_STEPS = 400
LOG_EVERY = 10
EVALUATE_EVERY = SAVE_EVERY = 100
TOKENS_PER_STEP = 8 * 256
PRICE_PER_HOUR = 3.5
CATEGORIES = ('start', 'compile', 'data_wait', 'step', 'evaluation', 'checkpoint', 'restore', 'other')
START, COMPILE, RESTORE, EVALUATION, SAVE, STEP, DATA_WAIT = 8.0, 5.0, 4.0, 3.0, 1.5, 0.5, 0.02
BEAT = 10.0


def config(**train):
    """Returns the contents of config.json after `resolve`, with further keys in the section train."""
    values = default()
    values.model.update({'family': 'llama', 'vocab_size': 512, 'num_layers': 4, 'dim': 256, 'num_heads': 4})
    values.model.update({'num_kv_heads': 4, 'head_dim': 64, 'ffn_dim': 704, 'max_positions': 256})
    values.data.update({'path': 'data/license', 'seq_len': 256})
    values.train.update(
        {'num_steps': NUM_STEPS, 'global_batch_size': 8, 'per_device_batch_size': 8, 'log_every': LOG_EVERY, **train}
    )
    values.eval.interval = EVALUATE_EVERY
    values.checkpoint.save_interval_steps = SAVE_EVERY
    return build(values)


def train_loss(step):
    return 2.0 + 4.2 * math.exp(-step / 90) + 0.05 * math.sin(step * 1.7)


def validation_loss(step):
    return 2.1 + 4.1 * math.exp(-step / 90)


def machine(kind, devices, processes, price):
    """Returns the fields of the event `started` about machine, program and plan."""
    return {
        'host': 'host0',
        'pid': 4242,
        'versions': {'python': '3.12.3', 'jax': '0.12.0', 'jaxlib': '0.12.0', 'flax': '0.12.8', 'maxlm': '0.2.0'},
        'git': {'commit': '0123456789abcdef0123456789abcdef01234567', 'dirty': False},
        'devices': {'kind': kind, 'count': devices, 'processes': processes, 'platform': 'gpu'},
        'parameters': 3_411_200,
        'mesh': f'fsdp={devices}' if devices > 1 else 'one device',
        'peak_tflops': 989.0,
        'peak_source': 'datasheet',
        'tokens_per_step': TOKENS_PER_STEP,
        'baseline': {'unigram_entropy': 5.25, 'tokens_per_byte': 0.25},
        'bytes_per_token': {'English': {'tokenizer': 2.5, 'GPT-2': 4.48}, 'Korean': {'GPT-2': 1.17}},
        'num_steps': NUM_STEPS,
        'price_per_hour': price,
        'price_source': 'train.price_per_hour' if price else None,
        'plan': {
            'step_seconds': 0.45,
            'tokens_per_second': TOKENS_PER_STEP / 0.45,
            'memory_bytes': 41 * GIB,
            'memory_available_bytes': 79 * GIB,
            'hours': 0.07,
            'dollars': 0.07 * price * devices if price else None,
        },
        'dataset': {
            'dataset web': 'a1b2c3',
            'dataset code': 'd4e5f6',
            'weight web': 0.7,
            'weight code': 0.3,
            'sources': [
                {'name': 'web', 'tokens': 900_000, 'weight': 0.7},
                {'name': 'code', 'tokens': 300_000, 'weight': 0.3},
            ],
        },
    }


def step_metrics(step, loss, skipped):
    """Returns the metrics of a training step without its cost; `loss=None` means not finite."""
    finite = loss is not None
    return {
        'step': step,
        'train/loss': loss,
        'train/best_loss': loss if finite else 2.5,
        'train/perplexity': math.exp(loss) if finite else None,
        'train/learning_rate': 2e-3 * min(step / 40, 1 - (step - 40) / NUM_STEPS),
        'train/grad_norm': 0.8 + 0.3 * math.sin(step) if finite else None,
        'train/param_norm': 50.0,
        'train/tokens': float(step * TOKENS_PER_STEP),
        'train/epoch': step * TOKENS_PER_STEP / 1_200_000,
        'train/skipped_steps': float(skipped),
        'train/loss/web': loss + 0.1 if finite else None,
        'train/loss/code': loss - 0.2 if finite else None,
        'data/seq_len': 256.0,
        'data/fraction/web': 0.7,
        'data/fraction/code': 0.3,
        'perf/tokens_per_second': TOKENS_PER_STEP / STEP * (1 + 0.02 * math.sin(step)),
        'perf/step_time_seconds': STEP,
        'perf/data_loading_seconds': DATA_WAIT,
        'perf/mfu': 0.42 + 0.01 * math.sin(step),
        'perf/mfu_full': 0.45 + 0.01 * math.sin(step),
        'memory/peak_gib': 44.0,
    }


def reading(kind, devices):
    """Returns the device statistics of a machine; CPUs have no device statistics."""
    return {
        'cpu_percent': 21.5,
        'process_cpu_percent': 130.0,
        'ram_bytes': 60 * GIB,
        'ram_total_bytes': 256 * GIB,
        'process_ram_bytes': 12 * GIB,
        'disk_free_bytes': 900 * GIB,
        'disk_read_bytes_per_second': 3.1e6,
        'disk_write_bytes_per_second': 1.2e6,
        'net_sent_bytes_per_second': 2e5,
        'net_received_bytes_per_second': 4e5,
        'devices': [
            {
                'index': index,
                'kind': kind,
                'use_percent': 97 - index,
                'memory_bytes': 44 * GIB,
                'memory_total_bytes': 80 * GIB,
                'temperature_c': 61 + index,
                'power_w': 640.5,
                'power_limit_w': 700.0,
                'clock_mhz': 1755,
                'clock_max_mhz': 1980,
                'throttled': ['power'] if index == 1 else [],
                'ecc_errors': 0,
            }
            for index in range(0 if kind == 'cpu' else devices)
        ],
    }
