"""A first model: 4 layers of width 256, trained on the data set in ./data.

Command:   maxlm train --config=configs/tiny.py --workdir=runs/tiny
Hardware:  any CPU with 2 cores
Time:      about three minutes
Cost:      nothing
Expected:  validation loss of 4.81 nats per token on Python's standard library (launch/demo.sh), whose unigram entropy
           is 6.52
"""

from ml_collections import ConfigDict

from maxlm.config.loading import default


def get_config() -> ConfigDict:
    config = default()

    config.model.family = 'llama'
    config.model.num_layers = 4
    config.model.dim = 256
    config.model.num_heads = 4
    config.model.ffn_dim = 704
    config.model.dtype = 'float32'  # two CPU cores are slower in bfloat16
    config.model.scan_layers = False  # scanning copies each layer's parameters out of the stacked arrays
    config.model.tie_embeddings = True

    config.data.seq_len = 256

    config.train.num_steps = 400
    config.train.global_batch_size = 8
    config.train.log_every = 10

    config.eval.interval = 100
    config.eval.num_batches = 16
    config.eval.num_samples = 2
    config.eval.sample_max_tokens = 48

    config.optimizer.learning_rate = 2e-3
    config.optimizer.min_learning_rate = 2e-4
    config.optimizer.warmup_steps = 40

    config.checkpoint.save_interval_steps = 100
    config.checkpoint.max_to_keep = 2
    return config
