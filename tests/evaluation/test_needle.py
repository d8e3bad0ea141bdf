"""Tests the construction and scoring of needle-in-a-haystack prompts."""

import numpy as np
import pytest

from maxlm.data.tokenizer.tokenizer import bytes_tokenizer
from maxlm.errors import InputError
from maxlm.evaluation.tasks.needle import (
    CHOICES,
    DEPTHS,
    NeedleConfig,
    default_lengths,
    draw_needles,
    find_needles,
)
from maxlm.inference.scoring import Likelihood

TOKENIZER = bytes_tokenizer()


class Reader:
    """Finds a number within the last `reach` tokens of its input, and nothing else."""

    max_length = 4096

    def __init__(self, reach):
        self.reach = reach
        self.texts = []

    def score(self, spans, *, show=False):
        del show
        self.texts = [(TOKENIZER.decode(span.context), TOKENIZER.decode(span.continuation)) for span in spans]
        seen = [text[-self.reach :] for text, _ in self.texts]
        return [
            Likelihood(0.0, True) if number.strip() in text else Likelihood(-9.0, False)
            for text, (_, number) in zip(seen, self.texts, strict=True)
        ]


def find(reach, **settings):
    reader = Reader(reach)
    return find_needles(reader, TOKENIZER, NeedleConfig(**{'lengths': (512, 1024), 'trials': 3, **settings})), reader


def test_texts_have_the_requested_depth_and_length():
    _, reader = find(10**6)
    assert len(reader.texts) == 2 * len(DEPTHS) * 3 * CHOICES
    cells = np.array(reader.texts, object).reshape(2, len(DEPTHS), 3, CHOICES, 2)
    for (n, d, _), (text, answer) in zip(np.ndindex(cells.shape[:3]), cells[:, :, :, 0].reshape(-1, 2), strict=True):
        length = (512, 1024)[n]
        assert length - 60 < len(text) + len(answer) <= length
        fact = text.index('The secret number of')
        assert text.count(answer.strip()) == 1
        end = text.rindex(' The secret number of')
        assert fact / end == pytest.approx(DEPTHS[d], abs=100 / length)
        assert text.endswith(' is')
    # Wrong answers never occur in the text.
    assert not any(answer.strip() in text for text, answer in cells[..., 1:, :].reshape(-1, 2))
    # A trial has the same question at every depth.
    assert (cells[:, 0, :, :, 1] == cells[:, -1, :, :, 1]).all()


def test_a_model_with_short_context_finds_near_needles():
    near, _ = find(400)
    # The reader sees the last 400 of 1024 tokens.
    assert near.choice_ND[1].tolist() == [0, 0, 0, 1, 1]
    assert near.retrieved_ND.tolist() == near.choice_ND.tolist()
    full_context, _ = find(10**6)
    assert full_context.choice_ND.min() == 1
    assert [measure.name for measure in full_context.measures] == [
        f'needle/{length}/{kind}' for length in (512, 1024) for kind in ('choice', 'retrieved')
    ]
    # A reader that considers all numbers equally likely finds none.
    assert find(1)[0].choice_ND.max() == 0


def test_the_seed_decides():
    assert find(9)[1].texts == find(9)[1].texts
    assert find(9)[1].texts != find(9, seed=1)[1].texts


def test_lengths():
    assert default_lengths(2048) == (256, 512, 1024, 2048)
    assert default_lengths(1000) == (256, 512, 1000)
    assert default_lengths(200) == (200,)
    for lengths, message in (
        ((8192,), '8192 exceeds the context length of the model; use at most 4096'),
        ((50,), 'use at least 7[0-9]'),
    ):
        with pytest.raises(InputError, match=message):
            find(9, lengths=lengths)


def test_the_figure(tmp_path):
    results, _ = find(400, lengths=(256, 512, 1024))
    figure = draw_needles(results, 'run@20')
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts.count('0.00') + texts.count('1.00') == len(texts) == 15
    assert '0.00' in texts
    figure.savefig(tmp_path / 'needle.png')
    assert (tmp_path / 'needle.png').stat().st_size > 5000
