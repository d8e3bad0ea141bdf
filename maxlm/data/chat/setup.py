"""Chooses chat template, special tokens and template variables for data preparation."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.chat.rendered import TemplateLimitError
from maxlm.data.chat.template import (
    CHAT_TEMPLATE_FILE,
    TOOL_TEMPLATE_FILE,
    VARIABLES,
    ChatTemplate,
    load_template,
    set_variables,
)
from maxlm.data.tokenizer.hub import download_tokenizer
from maxlm.data.tokenizer.model_files import SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG, read_json_object, token_text
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.storage.check_directory import check_entries

DEFAULT_TEMPLATE = 'chatml'
# Candidates for the beginning-of-text token if the configuration does not name one.
BEGINNINGS = ('<|begin_of_text|>', '<s>', '<bos>', '<|bos|>')


@dataclasses.dataclass(frozen=True)
class ChatRecipe:
    """Settings for rendering and packing conversations.

    Attributes:
        name: name of the template as given.
        source: source of the template.
        special_tokens: special tokens to add to the tokenizer if they are missing.
        variables: names and values of the template's variables from the tokenizer's configuration.
        window: tokens per packed sequence; 0 = no packing.
        has_config: True if the tokenizer has a TOKENIZER_CONFIG, which names its special tokens.
    """

    name: str
    source: str
    special_tokens: tuple[str, ...]
    variables: tuple[tuple[str, str], ...]
    window: int
    has_config: bool = False

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts that occur in the template."""
        return self._template.texts

    def with_tokens(self, tokenizer: Tokenizer) -> Tokenizer:
        """Returns the tokenizer with the special tokens added.

        Raises:
            InputError: the tokens cannot be added, or the template cannot render a conversation with them.
        """
        tokenizer = tokenizer.with_special_tokens(self.special_tokens)
        template = ChatTemplate(self.template_for(tokenizer), name=self.name)
        try:
            ChatEncoder(tokenizer, template)
        except InputError as error:
            is_limit = isinstance(error.__cause__, TemplateLimitError)
            remedy = 'fix it' if is_limit else 'list other special tokens than <|…|> with --special-tokens'
            raise InputError(f'--chat-template={self.name}: {error}; {remedy}') from error
        return tokenizer

    def template_for(self, tokenizer: Tokenizer) -> str:
        """Returns the source of the template with its variables set.

        If the tokenizer has a configuration, variables that it does not name are empty, as in Transformers. Otherwise
        they are the end-of-document token, but `bos_token` is the beginning of text or a token of BEGINNINGS if the
        tokenizer has one.
        """
        special = {token.content for token in tokenizer.special_tokens.values()}
        end = tokenizer.special_tokens[tokenizer.end_of_document].content
        values = dict.fromkeys(VARIABLES, '' if self.has_config else end)
        values['eos_token'] = end
        beginning = ''.join(tokenizer.special_tokens[index].content for index in tokenizer.beginning_of_document)
        if beginning or not self.has_config:
            values['bos_token'] = beginning or next((name for name in BEGINNINGS if name in special), end)
        values |= dict(self.variables)
        return set_variables(self.source, {name: values[name] for name in self._template.variables})

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.source, name=self.name)


def make_chat_recipe(template_name: str, *, tokenizer: str, special_tokens: Sequence[str], window: int) -> ChatRecipe:
    """Returns the recipe for the command-line options of a template and a tokenizer.

    Args:
        template_name: name in TEMPLATES, or a file; '' = the template beside the tokenizer, or DEFAULT_TEMPLATE.
        tokenizer: spec of the tokenizer. The directory of a file, or the model on the hub, is searched for a template.
        special_tokens: special tokens in addition to those in the template.
        window: see `ChatRecipe`.

    Raises:
        InputError: the template does not exist, or a file is damaged.
    """
    # Tokenizers that are made here have no directory.
    path = download_tokenizer(tokenizer.removeprefix('hf:')) if tokenizer.startswith('hf:') else Path(tokenizer)
    directory = path.parent if path.is_file() else None
    if directory:
        # Their contents become part of the data set.
        check_entries(directory, (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, CHAT_TEMPLATE_FILE, TOOL_TEMPLATE_FILE))
    config = read_json_object(directory / TOKENIZER_CONFIG) if directory else {}
    template_file = directory / CHAT_TEMPLATE_FILE if directory else Path(CHAT_TEMPLATE_FILE)
    if not template_name and template_file.is_file():
        name, template = str(template_file), load_template(str(template_file))
        if (with_tools := template_file.parent / TOOL_TEMPLATE_FILE).is_file():
            template = ChatTemplate(_either(load_template(str(with_tools)).source, template.source), name=name)
    elif not template_name and directory and (kept := template_in(config, str(directory / TOKENIZER_CONFIG))):
        name = str(directory / TOKENIZER_CONFIG)
        template = ChatTemplate(kept, name=name)
    else:
        name = template_name or DEFAULT_TEMPLATE
        template = load_template(name)
    older = read_json_object(directory / SPECIAL_TOKENS_MAP) if directory else {}
    named = {name: token_text(config.get(name)) or token_text(older.get(name)) for name in template.variables}
    variables = tuple((name, value) for name, value in named.items() if value)
    tokens = dict.fromkeys([*template.tokens, *special_tokens, *(value for _, value in variables)])
    return ChatRecipe(name, template.source, tuple(tokens), variables, window, has_config=bool(config))


def template_in(config: dict[str, Any], name: str) -> str:
    """Returns the template from a configuration, where older versions of Transformers store it; '' if there is none.

    Of several templates, `tool_use` renders conversations with tools, and `default` the others, as in Transformers.

    Raises:
        InputError: there are several templates, and none is named `default`. The message begins with `name`.
    """
    kept = config.get('chat_template')
    if isinstance(kept, list):
        kept = {entry.get('name'): entry.get('template') for entry in kept if isinstance(entry, dict)}
    if not isinstance(kept, dict):
        return kept if isinstance(kept, str) else ''
    named = {key: value for key, value in kept.items() if isinstance(value, str)}
    if named and 'default' not in named:
        raise InputError(
            f'{name}: no chat template is named default, only {", ".join(map(repr, named))[:200]}; '
            'write one of them to a file and give it with --chat-template'
        )
    default = named.get('default', '')
    return _either(named['tool_use'], default) if 'tool_use' in named else default


def _either(with_tools: str, without: str) -> str:
    """Returns the source of a template that renders conversations with tools by another template."""
    # Jinja removes one newline after a block, and one at the end of a template.
    sources = (source.removesuffix('\n') for source in (with_tools, without))
    return '{{% if tools %}}\n{}{{% else %}}\n{}{{% endif %}}'.format(*sources)
