"""Synthetic texts with known shingles and similarity."""

import random

from maxlm.data.documents.document import Document

SHINGLE = 5


def random_words(rng, num):
    """Returns unique words, so that no shingle occurs twice."""
    return [f'w{rng.getrandbits(60):015x}' for _ in range(num)]


def rewrite(rng, words, place, num):
    """Replaces `num` words from `place` on, which changes num + 4 shingles."""
    return [*words[:place], *random_words(rng, num), *words[place + num :]]


def jaccard(first, second):
    first, second = (
        {tuple(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1)} for words in (first, second)
    )
    return len(first & second) / len(first | second)


def pairs(num, similarity, seed=0):
    """Returns pairs of word lists of various lengths with a Jaccard similarity of exactly 0.8 or 0.5."""
    rng = random.Random(seed)
    # If d of m shingles differ, the similarity is (m - d) / (m + d).
    ratio = {0.8: 9, 0.5: 3}[similarity]
    result = []
    for _ in range(num):
        num_new = rng.randrange(1, 40)
        words = random_words(rng, ratio * (num_new + SHINGLE - 1) + SHINGLE - 1)
        place = rng.randrange(SHINGLE - 1, len(words) - num_new - SHINGLE + 2)
        result.append((words, rewrite(rng, words, place, num_new)))
    return result


def documents(texts):
    return [
        Document(f'{number}.txt', 'in', text if isinstance(text, str) else ' '.join(text))
        for number, text in enumerate(texts)
    ]
