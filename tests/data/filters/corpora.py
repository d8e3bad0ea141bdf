"""Synthetic texts whose shingles, and so whose similarity, are known."""

import random

from maxlm.data.documents.document import Document

SHINGLE = 5


def random_words(choice, num):
    """Words that occur nowhere else, so that no shingle is there twice."""
    return [f'w{choice.getrandbits(60):015x}' for _ in range(num)]


def rewrite(choice, words, place, num):
    """Other words instead of `num` from `place` on: num + 4 shingles are others."""
    return [*words[:place], *random_words(choice, num), *words[place + num :]]


def jaccard(first, second):
    first, second = (
        {tuple(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1)} for words in (first, second)
    )
    return len(first & second) / len(first | second)


def pairs(num, similarity, seed=0):
    """Pairs of lists of words with exactly this Jaccard similarity, 0.8 or 0.5, of many lengths."""
    choice = random.Random(seed)
    # Of m shingles each, d are others: (m - d) / (m + d) is the similarity.
    ratio = {0.8: 9, 0.5: 3}[similarity]
    result = []
    for _ in range(num):
        num_new = choice.randrange(1, 40)
        words = random_words(choice, ratio * (num_new + SHINGLE - 1) + SHINGLE - 1)
        place = choice.randrange(SHINGLE - 1, len(words) - num_new - SHINGLE + 2)
        result.append((words, rewrite(choice, words, place, num_new)))
    return result


def documents(texts):
    return [
        Document(f'{number}.txt', 'in', text if isinstance(text, str) else ' '.join(text))
        for number, text in enumerate(texts)
    ]
