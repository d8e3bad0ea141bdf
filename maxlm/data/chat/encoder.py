"""Encodes conversations as tokens with a loss mask: the loss covers only messages of the assistant.

Text of the template and text of the data are distinguished: only the template can produce special tokens.
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from maxlm.data.chat.escape import special_token_pattern
from maxlm.data.chat.rendered import ChatError, Rendered, Span, TemplateLimitError
from maxlm.data.chat.template import CHAT_TEMPLATE_FILE, ChatTemplate
from maxlm.data.chat.token_flags import IGNORE_BIT, TokenDocument, encode_flags
from maxlm.data.documents.conversation import Conversation
from maxlm.data.documents.document import Document
from maxlm.data.documents.messages import CALLS, Message
from maxlm.data.tokenizer.tokenizer import TOKENIZER_FILE, Tokenizer
from maxlm.errors import InputError, os_message
from maxlm.storage.regular_files import read_text


class _Piece(NamedTuple):
    """A special token, or a text to tokenize.

    Attributes:
        text: the text; '' for a special token.
        encoding: _FIRST, _AFTER_SPECIAL or _INSIDE; -1 for a special token.
        token: id of the special token; -1 for a text.
        learned: True if the loss covers the piece.
        ends_turn: True for the special token at the end of an assistant turn.
    """

    text: str
    encoding: int
    token: int
    learned: bool
    ends_turn: bool


# Encodings of texts at the beginning, after special tokens, and after other texts.
_FIRST, _AFTER_SPECIAL, _INSIDE = range(3)


class ChatEncoder:
    """Encodes conversations with a tokenizer that has the template's special tokens.

    Attributes:
        tokenizer: the tokenizer.
        template: the chat template.
        end_of_turn: id of the special token that ends a turn of the assistant.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate):
        """Raises InputError if the template cannot render an answer that ends with a special token."""
        self.tokenizer = tokenizer
        self.template = template
        self._num_over_limit = 0
        self._special = {token.content: (i, token) for i, token in tokenizer.special_tokens.items()}
        try:
            self.end_of_turn = self._special[template.end_of_turn(tuple(self._special))][0]
        except ChatError as error:
            raise InputError(str(error)) from error

    @classmethod
    def load(cls, directory: Path) -> ChatEncoder:
        """Loads the encoder of a data set or a workdir.

        Raises:
            InputError: the tokenizer or the chat template is missing or invalid.
        """
        path = directory / CHAT_TEMPLATE_FILE
        try:
            source = read_text(path)
        except (OSError, UnicodeDecodeError) as error:
            reason = os_message(error) if isinstance(error, OSError) else str(error)
            raise InputError(f'{path}: {reason}; conversations need a chat template') from error
        return cls(Tokenizer.load(directory / TOKENIZER_FILE), ChatTemplate(source, name=str(path)))

    def encode_prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] = (),
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> np.ndarray:
        """Returns the token ids of messages and of the generation prompt: uint32 [number of tokens].

        Args:
            messages: messages of the conversation.
            tools: JSON descriptions of tools.
            continue_final_message: end after the content of the last message instead of the generation prompt.
            template_kwargs: see `ChatTemplate.render`.

        Raises:
            ChatError: the template does not accept the messages or options.
        """
        rendered = self.render_prompt(
            messages,
            tools=tools,
            add_generation_prompt=not continue_final_message,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
        )
        return self.encode_rendered(rendered)

    def render_prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Returns the text of `encode_prompt` before tokenization, by default with the generation prompt.

        Raises:
            ChatError: the template does not accept the messages or options.
        """
        return self.template.render(
            messages,
            special=tuple(self._special),
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
        )

    def encode_rendered(self, rendered: Rendered) -> np.ndarray:
        """Returns the token ids of the result of `render_prompt`: uint32 [number of tokens]."""
        (ids,) = self._ids([list(self._cut(rendered, []))])
        return np.concatenate(ids)

    def encode_documents(
        self, documents: Sequence[Document], *, max_over_limit: int = 0
    ) -> list[TokenDocument | ChatError]:
        """Encodes documents for training.

        The loss covers the messages of the assistant in conversations, and all of a text after its prompt. A preference
        pair is encoded as two consecutive documents: the prompt with the chosen answer, and the prompt with the
        rejected answer. The loss covers both answers. For an answer with a label, the missing answer is a document of
        one token without loss. The result is empty if the answers are equal, an answer is empty, or a text has no
        tokens.

        Args:
            documents: documents to encode.
            max_over_limit: number of conversations, in all calls, that may exceed the limits of the template.

        Returns:
            For each document its tokens, or the error if the template does not accept it.

        Raises:
            InputError: a text cannot be tokenized.
            TemplateLimitError: more conversations exceed the limits. Each of them takes seconds.
        """
        found = [self._try(document, max_over_limit) for document in documents]
        ids = iter(self._ids([pieces for parts in found if not isinstance(parts, ChatError) for pieces in parts]))
        return [
            parts if isinstance(parts, ChatError) else self._joined(document, [(part, next(ids)) for part in parts])
            for document, parts in zip(documents, found, strict=True)
        ]

    def _try(self, document: Document, max_over_limit: int) -> list[list[_Piece]] | ChatError:
        try:
            if document.preference is not None:
                return [self._pieces_of(each) for each in document.preference.conversations]
            if document.conversation is not None:
                return [self._pieces_of(document.conversation)]
        except ChatError as error:
            if isinstance(error, TemplateLimitError):
                self._num_over_limit += 1
                if self._num_over_limit > max_over_limit:
                    raise TemplateLimitError(f'{document.name}: {error}') from None
            return error
        prompt, learned = document.text[: document.learned_from], document.text[document.learned_from :]
        # Token files have the tokens that their author wrote.
        beginning = self.tokenizer.beginning_of_document if document.tokens is None else ()
        pieces = [_Piece('', -1, index, False, False) for index in beginning]
        if not prompt:
            return [[*pieces, _Piece(learned, _FIRST, -1, True, False)]]
        return [[*pieces, _Piece(prompt, _FIRST, -1, False, False), _Piece(learned, _INSIDE, -1, True, False)]]

    def _joined(
        self, document: Document, parts: Sequence[tuple[Sequence[_Piece], Sequence[np.ndarray]]]
    ) -> TokenDocument:
        encoded = [self._encoded(document, pieces, ids) for pieces, ids in parts]
        preference = document.preference
        if preference is None:
            return encoded[0]
        answers = [answer.tokens for answer in encoded]
        for answer in answers:
            # Only the documents of a pair may predict its targets.
            answer[:1] |= IGNORE_BIT
        # The tokens are compared too, because a template may strip the answers.
        are_equal = len(answers) == 2 and np.array_equal(answers[0], answers[1])
        if are_equal or not preference.has_answers:
            return TokenDocument(answers[0][:0], ())
        if len(answers) == 1:
            missing = encode_flags(np.array([self.tokenizer.end_of_document]), np.array([False]))
            answers = [*answers, missing] if preference.rejected is None else [missing, *answers]
        return TokenDocument(np.concatenate(answers), ())

    def _encoded(self, document: Document, pieces: Sequence[_Piece], ids: Sequence[np.ndarray]) -> TokenDocument:
        if document.tokens is not None:
            ids = [document.tokens]
        lengths = [len(part) for part in ids]
        tokens = np.concatenate(ids)
        learned = np.repeat([piece.learned for piece in pieces], lengths)
        end = self.tokenizer.end_of_document
        is_text = document.conversation is None and document.preference is None
        # The token at the end of the last turn may be the end-of-document token.
        if len(tokens) and (is_text or tokens[-1] != end):
            tokens, learned = np.append(tokens, np.uint32(end)), np.append(learned, is_text)
        if is_text:
            return TokenDocument(encode_flags(tokens, learned), None)
        ends = itertools.compress(itertools.accumulate(lengths), (piece.ends_turn for piece in pieces))
        return TokenDocument(encode_flags(tokens, learned), tuple(ends))

    def _pieces_of(self, conversation: Conversation) -> list[_Piece]:
        rendered = self.template.render_with_spans(
            conversation.messages, special=tuple(self._special), tools=conversation.tools
        )
        _refuse_lost_calls(conversation, rendered)
        trains = [
            learned
            for message, learned in zip(conversation.messages, conversation.learned, strict=True)
            if message['role'] == 'assistant'
        ]
        if not all(trains) and len(trains) != len(rendered.assistant_spans):
            raise ChatError('the chat template omits some assistant messages, so weight 0 cannot be applied')
        trained = rendered.assistant_spans if all(trains) else itertools.compress(rendered.assistant_spans, trains)
        return list(self._cut(rendered, list(trained)))

    def _cut(self, rendered: Rendered, trained: Sequence[Span]) -> Iterator[_Piece]:
        """Splits the rendered text at its special tokens and at the borders of the `trained` spans."""
        text = rendered.text
        tokens = list(special_token_pattern(tuple(self._special)).finditer(text))
        starts, borders = [span.start for span in trained], sorted({place for span in trained for place in span})
        token_ends = [found.end() for found in tokens]
        # A span may contain text after the last special token.
        lasts = [([0, *token_ends][bisect.bisect_right(token_ends, span.stop)], span) for span in trained]
        ends = {end for end, span in lasts if end > span.start}

        def learned(place: int) -> bool:
            number = bisect.bisect_right(starts, place) - 1
            return number >= 0 and place < trained[number].stop

        def texts(start: int, stop: int, encoding: int) -> Iterator[_Piece]:
            inner = borders[bisect.bisect_right(borders, start) : bisect.bisect_left(borders, stop)]
            for a, b in itertools.pairwise([start, *inner, stop] if start < stop else []):
                yield _Piece(rendered.spelled(a, b), encoding if a == start else _INSIDE, -1, learned(a), False)

        place, encoding = 0, _FIRST
        for found in tokens:
            index, token = self._special[found.group()]
            start, stop = found.span()
            while token.lstrip and start > place and text[start - 1].isspace():
                start -= 1
            yield from texts(place, start, encoding)
            yield _Piece('', -1, index, learned(found.start()), found.end() in ends)
            while token.rstrip and stop < len(text) and text[stop].isspace():
                stop += 1
            place, encoding = stop, _AFTER_SPECIAL
        yield from texts(place, len(text), encoding)

    def _ids(self, documents: Sequence[Sequence[_Piece]]) -> list[list[np.ndarray]]:
        """Returns the ids of each piece of each document. Texts of the same encoding are tokenized in one batch."""
        encode = {
            _FIRST: self.tokenizer.encode_batch,
            _AFTER_SPECIAL: lambda texts: self.tokenizer.encode_batch_inside(texts, after_special=True),
            _INSIDE: self.tokenizer.encode_batch_inside,
        }
        pieces = list(itertools.chain.from_iterable(documents))
        encoded = {
            kind: iter(function([piece.text for piece in pieces if piece.encoding == kind]))
            for kind, function in encode.items()
        }
        return [
            [
                np.array([piece.token], np.uint32) if piece.token >= 0 else next(encoded[piece.encoding])
                for piece in document
            ]
            for document in documents
        ]


def _refuse_lost_calls(conversation: Conversation, rendered: Rendered) -> None:
    """Raises ChatError if a turn with loss lacks one of its tool calls, so that an empty answer would be trained."""
    turns = [
        (message.get(CALLS, ()), learned)
        for message, learned in zip(conversation.messages, conversation.learned, strict=True)
        if message['role'] == 'assistant'
    ]
    whole = Span(0, len(rendered.text))
    spans = rendered.assistant_spans if len(rendered.assistant_spans) == len(turns) else [whole] * len(turns)
    for (calls, learned), span in zip(turns, spans, strict=True):
        text = rendered.spelled(*span) if calls and learned else ''
        for call in calls if learned else ():
            name = call['function']['name']
            if name not in text and json.dumps(name)[1:-1] not in text:
                raise ChatError(f'the chat template does not show the tool call {name!r}; use a template that does')
