"""Table of all supported architectures by model_type."""

from maxlm.huggingface.architectures.architecture import GPT2, GPT_NEOX, LLAMA, MISTRAL, NANOCHAT, QWEN3
from maxlm.huggingface.architectures.dense import (
    GEMMA2,
    GEMMA3,
    GRANITE,
    OLMO2,
    OLMO3,
    PHI3,
    QWEN2,
    SMOLLM3,
    STARCODER2,
)
from maxlm.huggingface.architectures.experts import DEEPSEEK_V2, DEEPSEEK_V3, GPT_OSS, MIXTRAL, QWEN3_MOE

# Architectures that other programs also support. Only Transformers supports nanochat, so it must be requested.
DEFAULT_ARCHITECTURES = (
    GPT2,
    GPT_NEOX,
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    SMOLLM3,
    OLMO2,
    OLMO3,
    GRANITE,
    PHI3,
    GEMMA2,
    GEMMA3,
    MIXTRAL,
    QWEN3_MOE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GPT_OSS,
    STARCODER2,
)
ARCHITECTURES = {row.model_type: row for row in (*DEFAULT_ARCHITECTURES, NANOCHAT)}
