"""Downloads a model from the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from maxlm.errors import InputError

# Name of a model on the hub, in place of a directory: hf:ORG/NAME[@REVISION].
HUB = 'hf:'
# Config, tokenizer, chat templates and weights, without those of other frameworks.
_FILES = ('*.json', '*.safetensors', '*.jinja')


def download_model(name: str) -> Path:
    """Downloads the files of a model into the cache of the client. Returns their directory.

    Args:
        name: name of the model on the hub, optionally with `@REVISION`.

    Raises:
        InputError: the model can be neither downloaded nor read from the cache.
    """
    import huggingface_hub

    model, _, revision = name.partition('@')
    try:
        return Path(huggingface_hub.snapshot_download(model, revision=revision or None, allow_patterns=list(_FILES)))
    except Exception as error:  # of the client and of the network
        reason = ' '.join(str(error).split())
        raise InputError(
            f'--input={HUB}{name}: the model cannot be downloaded ({reason}); give a local directory to work offline'
        ) from error
