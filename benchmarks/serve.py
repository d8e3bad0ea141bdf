"""Compares the server with Transformers: `python -m benchmarks.serve [--size=small|0.1b] [--output=FILE]`.

A Llama with random weights is written in Transformers' format, served by `maxlm serve`, and loaded by Transformers in a
separate process. Both use float32 on all cores. 1, 8 and 32 clients send streaming requests over HTTP. A client sends
the next prompt when its response is complete. Transformers gets the same prompts in batches of the two largest powers
of two up to the number of clients, and its best batch size counts. A batch ends with its longest response. The result
of maxlm also has the 99th percentile of the time between two messages of a stream, each with one token or more.

Responses have different lengths as in real traffic (`mixed`), or one length (`equal`), for which batches waste no work.
The sides run in turns; ratios compare medians over the rounds. The first greedy tokens of both sides are compared
before. Needs maxlm's `dev` extra.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import queue
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peer_process import Peer
from benchmarks.step import machine
from maxlm.cli.parser import ArgumentParser
from maxlm.errors import EXIT_DONE, InputError, exit_code
from maxlm.log import progress_bar

SIZES = {
    'small': {'layers': 6, 'dim': 384, 'heads': 6, 'ffn': 1024, 'vocab': 8192, 'context': 1024},
    '0.1b': {'layers': 12, 'dim': 768, 'heads': 12, 'ffn': 2048, 'vocab': 32768, 'context': 1024},
}
CLIENTS = (1, 8, 32)
PROMPT_TOKENS = (16, 128)
# Ranges of response lengths, without the upper bound. The mean of both is 96.
NEW_TOKENS = {'mixed': (8, 185), 'equal': (96, 97)}
# Requests per client by number of clients; enough that idle clients at the end hardly matter.
REQUESTS_PER_CLIENT = {1: 6, 8: 6, 32: 3}
# Number of tokens that must agree on both sides.
SAME = 16


def main(argv: list[str]) -> int:
    """Measures both sides, prints a table and writes JSON."""
    parser = ArgumentParser(prog='benchmarks.serve', allow_abbrev=False, description=__doc__)
    parser.add_argument('--size', choices=SIZES, default='small', help='of the model (default small)')
    parser.add_argument('--rounds', type=int, default=3, help='turns of each side (default 3)')
    parser.add_argument('--clients', default=','.join(map(str, CLIENTS)), help='some of 1,8,32 (default all)')
    parser.add_argument('--output', type=Path, help='JSON file to write')
    options = parser.parse_args(argv)
    if options.rounds < 1:
        raise InputError(f'--rounds={options.rounds}: must be at least 1')
    clients = [int(part) for part in options.clients.split(',') if part.isdigit()]
    if not clients or not set(clients) <= set(CLIENTS):
        raise InputError(f'--clients={options.clients}: must be some of {",".join(map(str, CLIENTS))}')
    with tempfile.TemporaryDirectory() as folder:
        peer = Peer(
            'Transformers',
            [sys.executable, '-m', 'benchmarks.serve_peer', f'{folder}/model', json.dumps(SIZES[options.size])],
        )
        server = Server(Path(folder) / 'model')
        try:
            results = measure(server, peer, clients, options.rounds, vocab=SIZES[options.size]['vocab'])
        finally:
            server.end()
            peer.end()
    for result in results:
        ours, theirs = result['maxlm'], result['transformers']
        print(
            f'{result["answers"]}, {result["clients"]:3} clients: '
            f'maxlm {ours["tokens_per_second"]:7.1f} tokens/s, first token '
            f'{ours["first_token_seconds"]:.3f} s, 99% of gaps below {ours["gap_p99_seconds"]:.3f} s; '
            f'Transformers {theirs["tokens_per_second"]:7.1f}, '
            f'{theirs["first_token_seconds"]:.3f} s (batch {theirs["batch"]}); ratio {result["ratio"]:.2f}'
        )
    if options.output:
        found = {'machine': machine(), 'sizes': SIZES[options.size], 'new_tokens': NEW_TOKENS, 'results': results}
        options.output.write_text(json.dumps(found, indent=1) + '\n')
    return EXIT_DONE


def measure(server: Server, peer: Peer, clients: list[int], rounds: int, *, vocab: int) -> list[dict[str, Any]]:
    """Measures both sides in turns for each number of clients; `vocab` is the model's vocabulary size."""
    rng = np.random.default_rng(0)
    probe = rng.integers(2, vocab, 20).tolist()
    ours, theirs = server.ask(probe, SAME)[0], peer.work(prompts=[probe], batch=1, nums=[SAME])['tokens'][0]
    if ours != theirs:
        raise SystemExit(f'not the same model: {ours} and {theirs}')
    kinds = list(itertools.product(NEW_TOKENS, clients))
    found: dict[tuple[str, int], dict[str, list[dict[str, float]]]] = {
        kind: {'maxlm': [], 'transformers': []} for kind in kinds
    }
    with progress_bar('benchmark', total=rounds * len(kinds), unit='turn', show=True) as bar:
        for _ in range(rounds):
            for answers, number in kinds:
                lengths = rng.integers(*PROMPT_TOKENS, number * REQUESTS_PER_CLIENT[number])
                prompts = [rng.integers(2, vocab, length).tolist() for length in lengths]
                nums = rng.integers(*NEW_TOKENS[answers], len(prompts)).tolist()
                sides = found[answers, number]
                sides['maxlm'].append(server.serve(prompts, nums, number))
                sides['transformers'].append(_best_batch(peer, prompts, nums, number))
                bar.update()
    results = []
    for (answers, number), sides in found.items():
        medians: dict[str, dict[str, float]] = {
            side: {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
            for side, turns in sides.items()
        }
        ratio = medians['maxlm']['tokens_per_second'] / medians['transformers']['tokens_per_second']
        results.append({'answers': answers, 'clients': number, **medians, 'ratio': ratio, 'turns': sides})
    return results


def _best_batch(peer: Peer, prompts: list[list[int]], nums: list[int], clients: int) -> dict[str, float]:
    sizes = [2**k for k in range(clients.bit_length()) if 2**k <= clients]
    turns = []
    for size in sizes[-2:]:
        result = peer.work(prompts=prompts, batch=size, nums=nums)
        rate = sum(nums) / result['seconds']
        turns.append(
            {'tokens_per_second': rate, 'first_token_seconds': statistics.mean(result['first']), 'batch': float(size)}
        )
    return max(turns, key=lambda turn: turn['tokens_per_second'])


class Server:
    """`maxlm serve` in a separate process, with additional options.

    Attributes:
        address: host and port.
    """

    def __init__(self, model: Path, *options: str):
        slots = f'--slots={max(CLIENTS)}'
        command = [sys.executable, '-m', 'maxlm.serve', f'--checkpoint={model}', '--port=0', slots, *options]
        environment = {**os.environ, 'JAX_PLATFORMS': 'cpu'}
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self._process.stdout
        # Other startup messages precede the line with the address.
        found = next(
            filter(None, (re.search(r'^serving .*http://([\d.]+):(\d+)', line) for line in self._process.stdout)), None
        )
        if not found:
            raise SystemExit(f'the server ended with {self._process.wait()}')
        self.address = found[1], int(found[2])

    def ask(self, prompt: list[int], num: int) -> tuple[list[int], list[float]]:
        """Returns the token ids of a greedy response, and the seconds to each message, which has one or more tokens."""
        connection = http.client.HTTPConnection(*self.address, timeout=600)
        body = {'prompt': prompt, 'max_tokens': num, 'temperature': 0, 'stream': True, 'ignore_eos': True}
        start = time.perf_counter()
        connection.request('POST', '/v1/completions', json.dumps(body), {'Content-Type': 'application/json'})
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f'the server answered {response.status}: {response.read().decode()[:500]}')
        seconds, text = [], ''
        for line in response:
            if line.startswith(b'data: {'):
                seconds.append(time.perf_counter() - start)
                text += json.loads(line[6:])['choices'][0]['text']
        connection.close()
        # The tokenizer decodes each id to its number, and id 0 to the end-of-document token.
        ids = [int(word) if word.isdigit() else 0 for word in re.findall(r'\d+|<[^>]*>', text)]
        return ids, seconds

    def serve(self, prompts: list[list[int]], nums: list[int], clients: int) -> dict[str, float]:
        """Requests `nums` tokens for the prompts from concurrent clients and returns throughput and latency."""
        streams: list[list[float]] = []
        left: queue.SimpleQueue[tuple[list[int], int]] = queue.SimpleQueue()
        for one in zip(prompts, nums, strict=True):
            left.put(one)

        def work() -> None:
            with contextlib.suppress(queue.Empty):
                while True:
                    prompt, num = left.get_nowait()
                    ids, arrivals = self.ask(prompt, num)
                    assert len(ids) == num, len(ids)
                    streams.append(arrivals)

        threads = [threading.Thread(target=work) for _ in range(clients)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if len(streams) != len(prompts):
            raise SystemExit('a request to the server failed')
        seconds = time.perf_counter() - start
        return {
            'tokens_per_second': sum(nums) / seconds,
            'first_token_seconds': statistics.mean(arrivals[0] for arrivals in streams),
            'gap_p99_seconds': gap_p99(streams),
        }

    def end(self) -> None:
        """Stops the server."""
        self._process.terminate()
        # communicate() waits for the process and closes its pipe.
        self._process.communicate()


def gap_p99(streams: list[list[float]]) -> float:
    """Returns the 99th percentile of the time between two messages of a stream, over all streams.

    Args:
        streams: times of the messages of each stream.
    """
    gaps = [later - earlier for times in streams for earlier, later in itertools.pairwise(times)]
    return float(np.percentile(gaps, 99))


def run() -> None:
    """Entry point of `python -m benchmarks.serve`."""
    sys.exit(exit_code(main, sys.argv[1:]))


if __name__ == '__main__':
    run()
