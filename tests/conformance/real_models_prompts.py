"""Prompts and texts for real models: base and chat, several turns, Unicode, code, and 1,500 tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LICENSE = (Path(__file__).parents[2] / 'LICENSE').read_text()
# Characters with about 1,500 tokens for both models.
LONG = 7_000
MAX_TOKENS = 16
LONG_ANSWER = 48
LOSS_TEXT = LICENSE[:6_000]

TEXTS = (
    'The capital of France is',
    'Once upon a time, there was a little girl who',
    'def fibonacci(n):\n    """Returns the n-th Fibonacci number."""\n',
    'Q: How many legs does a spider have?\nA:',
    'L’été dernier, nous sommes allés à',
    '日本の首都は',
    'مرحبا، كيف',
    'Emoji: 🙂🙃🇳🇴👩‍👩‍👧 means',
    '1, 2, 3, 4, 5, 6,',
    '  leading and trailing  ',
    'import numpy as np\n\n\tx = np.arange(10)\n',
    LICENSE[:LONG],
    '{"name": "Ada", "age": 36, "tags": ["math",',
    '# Title\n\n- one\n- two\n-',
    'Привет! Меня зовут',
    '조선의 수도는',
    'SELECT name, COUNT(*) FROM users GROUP BY',
    'E = mc² and ∑ᵢ xᵢ ≤',
    'a\u0301 naïve café ﬁ½',
    'The quick brown fox jumps over the lazy dog. The quick brown fox',
)


def _chat(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    first = [] if system is None else [{'role': 'system', 'content': system}]
    roles = ('user', 'assistant')
    return first + [{'role': roles[number % 2], 'content': text} for number, text in enumerate(contents)]


CHATS = (
    _chat('What is the capital of Norway?'),
    _chat('Say hello.', system='You answer in French.'),
    _chat('My name is Ada.', 'Nice to meet you, Ada!', 'What is my name?'),
    _chat('2+2?', '4', '3+3?', '6', '4+4?', system='Answer with a number only.'),
    _chat('Write a Python function that reverses a string.'),
    _chat('Übersetze „Guten Morgen“ ins Englische 🙂'),
    _chat('  spaces \n\n and lines\t'),
    _chat(f'Summarize:\n\n{LICENSE[:LONG]}'),
)

# Conversations that fit into one sequence of WINDOW tokens, and a document of 1 to 2 sequences.
WINDOW = 256
TUNING = (
    _chat('My name is Ada.', 'Nice to meet you, Ada!', 'What is my name?', 'Your name is Ada.'),
    _chat('2+2?', '4', '3+3?', '6', system='Answer with a number only.'),
    _chat('Wie heißt „cat“ auf Deutsch?', 'Katze 🐈'),
)
DOCUMENT = LICENSE[:1_600]


def requests(*, has_template: bool) -> list[dict[str, Any]]:
    """Returns 20 requests with `text` or `messages`, and `max_tokens`. Chat models get twelve texts and all chats."""
    texts = TEXTS[: len(TEXTS) - len(CHATS)] if has_template else TEXTS
    chats = CHATS if has_template else ()
    return [
        *({'text': text, 'max_tokens': MAX_TOKENS} for text in texts),
        # Short answers end with a stop token before the limit.
        *(
            {'messages': messages, 'max_tokens': LONG_ANSWER if len(str(messages)) < LONG else MAX_TOKENS}
            for messages in chats
        ),
    ]
