"""What a preparation does with conversations: which template spells them, with which special tokens and variables."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.chat.template import CHAT_TEMPLATE_FILE, VARIABLES, ChatTemplate, load_template, set_variables
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError, os_message
from maxlm.storage.json_text import parse_json
from maxlm.storage.regular_files import MAX_TEXT_BYTES, read_bytes

DEFAULT_TEMPLATE = 'chatml'
# What lies beside a `tokenizer.json` of Transformers, and may hold names of tokens and a template.
TOKENIZER_CONFIG = 'tokenizer_config.json'
# Special tokens that begin a text, where nothing tells which one does.
BEGINNINGS = ('<|begin_of_text|>', '<s>', '<bos>', '<|bos|>')


@dataclasses.dataclass(frozen=True)
class ChatRecipe:
    """How conversations are spelled and written.

    Attributes:
        name: of the template, as it was given.
        source: the template.
        special_tokens: what the tokenizer gets as special tokens, where it does not have them.
        variables: names and values of the template's variables that came with the tokenizer.
        window: tokens of the windows that conversations are packed into; 0 = they are not packed.
    """

    name: str
    source: str
    special_tokens: tuple[str, ...]
    variables: tuple[tuple[str, str], ...]
    window: int

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts that the template writes."""
        return self._template.texts

    def with_tokens(self, tokenizer: Tokenizer) -> Tokenizer:
        """The tokenizer with the special tokens.

        Raises:
            InputError: it cannot have them, or the template does not spell a conversation with them.
        """
        tokenizer = tokenizer.with_special_tokens(self.special_tokens)
        template = ChatTemplate(self.template_for(tokenizer), name=self.name)
        try:
            ChatEncoder(tokenizer, template)
        except InputError as error:
            raise InputError(
                f'--chat-template={self.name}: {error}; --special-tokens names those that do not look like <|…|>'
            ) from error
        return tokenizer

    def template_for(self, tokenizer: Tokenizer) -> str:
        """The source of the template that knows its variables: what is not told is the end of document."""
        special = {token.content for token in tokenizer.special_tokens.values()}
        end = tokenizer.special_tokens[tokenizer.end_of_document].content
        values = dict.fromkeys(VARIABLES, end)
        values['bos_token'] = next((name for name in BEGINNINGS if name in special), end)
        values |= dict(self.variables)
        return set_variables(self.source, {name: values[name] for name in self._template.variables})

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.source, name=self.name)


def make_chat_recipe(given: str, *, tokenizer: str, special_tokens: Sequence[str], window: int) -> ChatRecipe:
    """The recipe for a template and a tokenizer as the command has them.

    Args:
        given: a name of TEMPLATES or a file; '' = what lies beside the tokenizer, or DEFAULT_TEMPLATE.
        tokenizer: its spec; files are looked for beside that of a file.
        special_tokens: besides those that the template shows.
        window: see `ChatRecipe`.

    Raises:
        InputError: there is no such template, or a file is damaged.
    """
    # A spec that names no file has no directory either.
    directory = Path(tokenizer).parent if Path(tokenizer).is_file() else None
    config = _read_config(directory / TOKENIZER_CONFIG) if directory else {}
    beside = directory / CHAT_TEMPLATE_FILE if directory else Path(CHAT_TEMPLATE_FILE)
    kept = _template_in(config)
    if given or not directory or not (kept or beside.is_file()):
        name = given or DEFAULT_TEMPLATE
        template = load_template(name)
    elif beside.is_file():
        name, template = str(beside), load_template(str(beside))
    else:
        name = str(directory / TOKENIZER_CONFIG)
        template = ChatTemplate(kept, name=name)
    named = {name: _content(config.get(name)) for name in template.variables}
    variables = tuple((name, value) for name, value in named.items() if value)
    tokens = dict.fromkeys([*template.tokens, *special_tokens, *(value for _, value in variables)])
    return ChatRecipe(name, template.source, tuple(tokens), variables, window)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = parse_json(read_bytes(path, limit=MAX_TEXT_BYTES))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InputError(f'{path}: {os_message(error)}') from error
    except ValueError as error:
        raise InputError(f'{path} is not JSON ({error})') from error
    if not isinstance(config, dict):
        raise InputError(f'{path} is not a JSON object')
    return config


def _template_in(config: dict[str, Any]) -> str:
    """The template that older versions of Transformers keep in there, or the one of several that is the default."""
    kept = config.get('chat_template')
    if isinstance(kept, list):
        kept = {entry.get('name'): entry.get('template') for entry in kept if isinstance(entry, dict)}.get('default')
    return kept if isinstance(kept, str) else ''


def _content(token: Any) -> str:
    """A token, which older versions write as an object."""
    token = token.get('content') if isinstance(token, dict) else token
    return token if isinstance(token, str) else ''
