"""Tests the comparison of the server and its peer, with fakes for both."""

import pytest

from benchmarks import serve


class Peer:
    """Fake peer that responds in batches. A batch takes a second, and 0.1 s for every prompt after the first."""

    def __init__(self, tokens=7):
        self.tokens, self.batches = tokens, []

    def work(self, *, prompts, batch, nums):
        assert len(nums) == len(prompts)
        self.batches.append(batch)
        num_batches = -(-len(prompts) // batch)
        seconds = num_batches * (1 + 0.1 * (batch - 1))
        return {'tokens': [[self.tokens] * num for num in nums], 'first': [0.5] * len(prompts), 'seconds': seconds}


class Server:
    def ask(self, prompt, num):
        return [7] * num, [0.1, 1.0]

    def serve(self, prompts, nums, clients):
        self.nums = nums
        return {'tokens_per_second': 100.0 * clients, 'first_token_seconds': 0.25, 'gap_p99_seconds': 0.01}


def test_best_batch_size_is_compared():
    peer, server = Peer(), Server()
    *mixed, one, eight = serve.measure(server, peer, [1, 8], 2, vocab=100)
    assert [(found['answers'], found['clients']) for found in (*mixed, one, eight)] == [
        ('mixed', 1),
        ('mixed', 8),
        ('equal', 1),
        ('equal', 8),
    ]
    assert sorted(set(peer.batches)) == [1, 4, 8]
    # Six requests for each client: 48 responses in six batches.
    assert server.nums == [96] * 48
    rate = 48 * 96 / (6 * 1.7)
    assert eight['transformers'] == pytest.approx({'tokens_per_second': rate, 'first_token_seconds': 0.5, 'batch': 8})
    assert eight['ratio'] == pytest.approx(800 / rate)
    assert one['ratio'] == pytest.approx(100 / 96)


def test_time_between_messages():
    """The gaps of each stream count, and the time to its first message does not."""
    assert serve.gap_p99([[5.0, 5.1, 5.2], [9.0, 9.1]]) == pytest.approx(0.1)
    # One stall among 100 gaps is within the last percent, and one among four is not.
    steady = [0.1 * step for step in range(101)]
    stalled = [*steady[:50], *(time + 3 for time in steady[50:])]
    assert serve.gap_p99([steady, stalled]) == pytest.approx(0.1)
    assert serve.gap_p99([steady, *[stalled] * 4]) == pytest.approx(0.1)
    assert serve.gap_p99([stalled[48:53]] * 4) == pytest.approx(3.1)


def test_another_model_is_not_compared():
    with pytest.raises(SystemExit, match='not the same model'):
        serve.measure(Server(), Peer(tokens=8), [1], 1, vocab=100)
