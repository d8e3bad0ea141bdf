"""The formats of Hugging Face: directories of config.json and safetensors, read and written without their libraries."""
