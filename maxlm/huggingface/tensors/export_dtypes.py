"""Dtypes of exported weights. This module imports no library, because the command line also needs the names."""

# Names on the command line and in config.json.
SAFETENSORS_DTYPES = ('bfloat16', 'float16', 'float32')
# Default for models that are not imported.
DEFAULT_DTYPE = 'bfloat16'
GGUF_DTYPES = ('f16', 'f32', 'q8_0')
