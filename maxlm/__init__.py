"""maxlm: from raw text to a served language model, with one config file."""

__version__ = '0.1.0'
