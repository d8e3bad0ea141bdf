"""Arguments of the smallest model that benchmarks of the training step can run."""

from tests.conftest import ROOT

TINY = [
    f'--config={ROOT}/configs/tiny.py',
    '--config.model.num_layers=1',
    '--config.model.dim=16',
    '--config.model.num_heads=1',
    '--config.model.ffn_dim=16',
    '--config.model.vocab_size=256',
    '--config.data.seq_len=16',
]
