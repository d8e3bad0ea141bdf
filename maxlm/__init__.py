"""maxlm trains, evaluates and serves language models from raw text, with one config file."""

__version__ = '0.2.0'
