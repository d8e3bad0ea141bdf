"""Downloads a tokenizer from the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from maxlm.data.tokenizer.model_files import GENERATION_CONFIG, MODEL_CONFIG, SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG
from maxlm.errors import InputError

# Files that may be missing: beginning- and end-of-text tokens, and the chat template.
_OPTIONAL = (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, GENERATION_CONFIG, MODEL_CONFIG)
_TEMPLATES = ('chat_template.jinja', 'additional_chat_templates/tool_use.jinja')


def download_tokenizer(name: str) -> Path:
    """Downloads the tokenizer files of a model into the cache of the client. Returns the path of `tokenizer.json`.

    Args:
        name: name of the model on the hub, optionally with `@REVISION`.

    Raises:
        InputError: the model has no `tokenizer.json`, or a file can be neither downloaded nor read from the cache.
    """
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    model, _, revision = name.partition('@')
    revision = revision or 'main'
    try:
        path = huggingface_hub.hf_hub_download(model, 'tokenizer.json', revision=revision)
        for file in (*_OPTIONAL, *_TEMPLATES):
            try:
                huggingface_hub.hf_hub_download(model, file, revision=revision)
            except LocalEntryNotFoundError:
                # The file may exist on the hub.
                raise
            except EntryNotFoundError:
                continue
    except Exception as error:  # of the client and of the network
        reason = ' '.join(str(error).split())
        raise InputError(
            f'--tokenizer=hf:{name}: no tokenizer.json from the hub ({reason}); give a local path to work offline'
        ) from error
    return Path(path)
