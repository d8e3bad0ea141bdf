"""Loads a draft model for speculative decoding, and checks that its tokens are those of the model."""

from __future__ import annotations

from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.inference.load import LoadedModel, load_model
from maxlm.inference.resolve_model import resolved_checkpoint
from maxlm.log import logger


def load_draft(checkpoint: str, model: LoadedModel, *, share_layers: bool = False) -> LoadedModel | None:
    """Loads a draft model on the devices of the model.

    Args:
        checkpoint: a checkpoint as in `load_model`, a model of Transformers or nanochat, `hf:NAME[@REVISION]` of the
            Hugging Face Hub, or a GGUF file; '' = no draft model, and the result is None.
        model: the model whose tokens are drafted.
        share_layers: see `load_model`; as for the model.

    Raises:
        InputError: the checkpoint cannot be loaded, or its tokenizer is another one.
    """
    if not checkpoint:
        return None
    try:
        with resolved_checkpoint(checkpoint) as found:
            draft = load_model(found, num_devices=model.layout.mesh.size, share_layers=share_layers)
    except InputError as error:
        reason = str(error).replace('--checkpoint=', '--draft-model=')
        if '--draft-model=' not in reason:
            reason = f'--draft-model={checkpoint}: {reason}'
        raise InputError(reason) from error
    if difference := _difference(model.tokenizer, draft.tokenizer):
        raise InputError(
            f'--draft-model={checkpoint}: has another tokenizer than the model: {difference}; '
            'use a smaller model of the same family, or one that was trained with the same tokenizer'
        )
    context, of_model = draft.config.model.max_positions, model.config.model.max_positions
    if context < of_model:
        logger.info(
            f'--draft-model={checkpoint}: has a context of {context:,} tokens, and the model one of {of_model:,}; '
            'no tokens are drafted at later positions'
        )
    return draft


def _difference(tokenizer: Tokenizer, draft: Tokenizer) -> str:
    """Returns the first difference between the tokens of two tokenizers; '' = none.

    Ids that only one of them has are not compared: vocabularies are often padded to different sizes. Only ids reach
    the draft model, so options of a token, such as its mark as special, do not matter.
    """
    if tokenizer.ids_sha256 == draft.ids_sha256:
        return ''
    ours, others = tokenizer.tokens, draft.tokens
    for index in sorted(ours.keys() & others.keys()):
        if ours[index] != others[index]:
            return f'id {index} is {others[index]!r:.60}, and {ours[index]!r:.60} in the model'
    shared = len(ours.keys() & others.keys())
    if 2 * shared < max(len(ours), len(others)):
        return f'only {shared:,} of {max(len(ours), len(others)):,} ids are the same'
    return ''
