"""Scores the responses of rollouts with a frozen reward model, on the devices of the run.

Shapes: N responses, B rows of a program, T padded length of a conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from maxlm.checkpoint.frozen_models import REWARD_MODEL, frozen_checksum, read_reward_model, workdir_of
from maxlm.checkpoint.init_from import load_tokenizer
from maxlm.config.schema import Config
from maxlm.config.sections.posttraining import GrpoConfig
from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.chat.token_flags import is_target, token_ids
from maxlm.data.documents.conversation import make_conversation
from maxlm.data.documents.document import Document
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.log import logger
from maxlm.parallel.determinism import deterministic_options
from maxlm.parallel.layout import Layout
from maxlm.rl.generation.responses import Responses
from maxlm.rl.rewards.rewards import MODEL_SCORE, parse_reward
from maxlm.training.forward import make_scores
from maxlm.training.state import Params
from maxlm.workdir.files import CHAT_TEMPLATE, TOKENIZER

# Attention kernels need lengths that are multiples of this.
MULTIPLE = 128


class RewardModel:
    """Scores conversations at the last token that the chat template writes, like `with_scored_tokens`.

    A response without an end token is scored as if it ended after its last token.

    Attributes:
        checksum: hash of the checksums of its parameters.
    """

    def __init__(self, checkpoint: str, encoder: ChatEncoder):
        """
        Args:
            checkpoint: value of `grpo.reward_model`.
            encoder: encoder of the prompts, with the tokenizer and the chat template of the reward model.
        """
        self.checksum = frozen_checksum(checkpoint, key=REWARD_MODEL)
        self._end_of_turn = encoder.end_of_turn
        self._after_turn = _ids_after_turn(encoder)
        self._layout: Layout | None = None
        self._params: Params | None = None

    def open(self, config: Config, layout: Layout) -> None:
        """Reads the parameters and prepares the program.

        Args:
            config: resolved config of the run, with `scorer`.
            layout: layout of the policy's parameters, which is that of the reward model too.

        Raises:
            InputError: the checkpoint cannot be read, or conversations exceed the positions of the reward model.
        """
        assert config.scorer is not None, 'see `with_frozen_models`'
        # A response may lack its end token.
        length = config.data.seq_len + 1 + len(self._after_turn)
        most = config.scorer.max_positions
        if config.scorer.position_embedding == 'learned' and length > most:
            raise InputError(
                f'{REWARD_MODEL}={config.grpo.reward_model}: the reward model has positions for {most} tokens, but '
                f'conversations have up to {length}; set data.seq_len={config.data.seq_len - length + most} or less'
            )
        self._length = length if config.scorer.attention == 'xla' else -(-length // MULTIPLE) * MULTIPLE
        self._rows = config.train.per_device_batch_size * config.batch_shards
        self._layout, self._params = layout, read_reward_model(config, layout)
        self._program = _make_program(config, layout)
        logger.info(f'responses are scored by the reward model {config.grpo.reward_model}')

    def __call__(self, prompts: Sequence[np.ndarray], responses: Responses) -> np.ndarray:
        """Returns the score of each response, float32 [N]. All processes call it together with the same arguments.

        Args:
            prompts: token ids of the prompt of each response.
            responses: N responses.

        Raises:
            InputError: a score is not finite.
        """
        assert self._layout is not None, 'call open() first'
        rows, local = self._rows, self._layout.local_rows(self._rows)
        ids = [self._conversation(prompt, responses, row) for row, prompt in enumerate(prompts)]
        found = []
        for start in range(0, len(ids), rows):
            batch = _batch(ids[start : start + rows], rows, self._length)
            placed = self._layout.put_batch({name: array[local] for name, array in batch.items()}, rows)
            found.append(self._program(self._params, placed))
        scores_N: np.ndarray = np.concatenate(jax.device_get(found))[: len(ids)]
        if not np.isfinite(scores_N).all():
            raise InputError(f'{REWARD_MODEL}: the score of a response is not finite; use another checkpoint')
        return scores_N

    def _conversation(self, prompt: np.ndarray, responses: Responses, row: int) -> np.ndarray:
        length = int(responses.num_B[row] - responses.ended_B[row])
        end = [self._end_of_turn, *self._after_turn]
        return np.concatenate([prompt, responses.tokens_BR[row, :length], end]).astype(np.int32)


def open_reward_model(grpo: GrpoConfig, encoder: ChatEncoder | Tokenizer) -> RewardModel | None:
    """Returns the reward model of a config; None without one. Its parameters are not read yet.

    Args:
        grpo: section `grpo` of the config.
        encoder: encoder of the prompts of the run.

    Raises:
        InputError: only one of `grpo.reward_model` and the reward `reward_model` is set, the tokenizer or the chat
            template of the reward model is not that of the run, or evaluations would need correct answers.
    """
    sums = {
        key: parse_reward(text, is_imported=False)
        for key, text in (('grpo.reward', grpo.reward), ('grpo.eval_reward', grpo.eval_reward or grpo.reward))
    }
    using = [key for key, total in sums.items() if total.uses_model]
    key = f'{REWARD_MODEL}={grpo.reward_model}'
    if using and not grpo.reward_model:
        raise InputError(
            f"{using[0]} contains {MODEL_SCORE}, but {REWARD_MODEL}=''; set it to the checkpoint of a reward model"
        )
    if not grpo.reward_model:
        return None
    if not using:
        raise InputError(
            f'{key} has no effect with grpo.reward={grpo.reward}; set grpo.reward={MODEL_SCORE}, or a sum that '
            'contains it'
        )
    if sums['grpo.eval_reward'].uses_model and grpo.eval_num_generations:
        raise InputError(
            f'grpo.eval_num_generations={grpo.eval_num_generations}: pass@k needs correct answers, and a reward model '
            'gives none; set it to 0, or grpo.eval_reward to another reward'
        )
    if isinstance(encoder, Tokenizer):
        raise InputError(
            f'{key}: scores conversations, but the model has no chat template; start from a model trained on '
            'conversations'
        )
    workdir = workdir_of(grpo.reward_model)
    tokenizer, template = workdir / TOKENIZER, workdir / CHAT_TEMPLATE
    if not tokenizer.is_file() or load_tokenizer(tokenizer).ids_sha256 != encoder.tokenizer.ids_sha256:
        raise InputError(
            f'{key}: its tokenizer, {tokenizer}, is missing or not that of the model; use a reward model that '
            'was trained from train.init_from'
        )
    if not template.is_file() or template.read_text() != encoder.template.source:
        raise InputError(
            f'{key}: its chat template, {template}, is missing or not that of the model; prepare the preferences with '
            'the chat template of the model'
        )
    return RewardModel(grpo.reward_model, encoder)


def _ids_after_turn(encoder: ChatEncoder) -> list[int]:
    """Returns the ids that the chat template writes after the end of the last turn."""
    messages = [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'a'}]
    document = Document('turn', 'turn', conversation=make_conversation(messages, {}))
    (found,) = encoder.encode_documents([document])
    if isinstance(found, Exception):
        raise InputError(f'the chat template cannot render an answer: {found}; fix the template') from found
    ids = token_ids(found.tokens).tolist()
    # The appended end-of-document token is no target.
    if ids[-1] == encoder.tokenizer.end_of_document and not is_target(found.tokens)[-1]:
        ids = ids[:-1]
    return ids[len(ids) - ids[::-1].index(encoder.end_of_turn) :]


def _batch(ids: Sequence[np.ndarray], rows: int, length: int) -> dict[str, np.ndarray]:
    """Returns conversations as arrays [B, T], and the index of the last token of each, [B]. Other rows are padding."""
    shapes = dict.fromkeys(('tokens', 'segments', 'positions'), (rows, length)) | {'last': (rows,)}
    batch: dict[str, np.ndarray] = {name: np.zeros(shape, np.int32) for name, shape in shapes.items()}
    for row, tokens in enumerate(ids):
        batch['tokens'][row, : len(tokens)] = tokens
        batch['segments'][row, : len(tokens)] = 1
        batch['positions'][row, : len(tokens)] = np.arange(len(tokens))
        batch['last'][row] = len(tokens) - 1
    return batch


def _make_program(config: Config, layout: Layout) -> Callable[[Params, dict[str, jax.Array]], jax.Array]:
    scores = make_scores(config.of_scorer, layout)

    def run(params: Params, batch: dict[str, jax.Array]) -> jax.Array:
        scores_BT = scores(params, None, batch, None)
        return jnp.take_along_axis(scores_BT, batch['last'][:, None], axis=1)[:, 0]

    options = deterministic_options(config, layout.platform)
    return jax.jit(run, out_shardings=layout.named(), compiler_options=options)
