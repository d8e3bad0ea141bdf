"""Steps through the grammar of one text, token by token."""

import numpy as np

from maxlm.inference.engine.compiled_grammar import wait_for_masks
from maxlm.inference.engine.grammar import Grammars


class Matcher:
    """A `TokenMatcher` that waits for each mask."""

    def __init__(self, matcher, end):
        self._matcher, self._end = matcher, end

    def mask(self):
        assert self._matcher.mask is not None, self._matcher.failure
        if self._matcher.forced:
            (token,) = self._matcher.forced[:1]
            words = np.zeros_like(self._matcher.mask)
            words.view(np.uint32)[token // 32] = 1 << token % 32
            return words
        return self._matcher.mask

    def accept(self, token):
        if self.is_complete:
            return token == self._end
        if self.failure:
            return False
        if self._matcher.forced:
            expected, self._matcher.forced = self._matcher.forced[0], self._matcher.forced[1:]
            return token == expected
        self._matcher.accept([token])
        while self._matcher.is_waiting:
            wait_for_masks([self._matcher], None)
        return not self._matcher.failure

    @property
    def is_complete(self):
        return self._matcher.is_complete

    @property
    def failure(self):
        return self._matcher.failure


def start(tokenizer, grammar):
    """Returns a matcher at the beginning of a text."""
    return Matcher(Grammars(tokenizer, [tokenizer.end_of_document]).compile(grammar).start(), tokenizer.end_of_document)
