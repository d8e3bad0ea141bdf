"""Tests generation with inputs in 8 bits, with the compiled kernels and without."""

PROMPT, NUM = (3, 1, 4, 1, 5, 9, 2, 6), 8
KEYS = {
    'model__family': 'llama',
    'model__dim': 64,
    'model__num_kv_heads': 1,
    'model__head_dim': 32,
    'model__ffn_dim': 128,
    'model__vocab_size': 257,
    'model__max_positions': 64,
}
