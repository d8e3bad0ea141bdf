"""Measures options of the server: `python -m benchmarks.serve_options --checkpoint=WORKDIR [--output=FILE]`.

Two servers on all cores of this machine serve the same checkpoint, one of them with `--num-draft-tokens`. Clients send
completions over HTTP, and the settings run in turns. Ratios compare medians over the rounds.

- Drafts: greedy completions of repeated text. A model that has not learned to repeat the prompt repeats itself.
- Grammar: completions with a JSON schema, compared by time per token with completions of the same length without one.
- Hostile: latency of completions without a schema while 8 clients send those of `benchmarks.hostile_schemas`, compared
  with an idle server. The clients have the lowest priority, because they would run on other machines.
"""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.serve import Server
from benchmarks.step import machine
from maxlm.cli.parser import ArgumentParser
from maxlm.errors import EXIT_DONE, InputError, exit_code
from maxlm.inference.drafting.prompt_lookup import MAX_DRAFT_TOKENS

# Each item has keys without alternatives, and strings of any text. The array is longer than a response.
SCHEMA = {
    'type': 'array',
    'minItems': 1000,
    'items': {
        'type': 'object',
        'properties': {'name': {'type': 'string'}, 'number': {'type': 'integer'}},
        'required': ['name', 'number'],
        'additionalProperties': False,
    },
}
RESPONSE_FORMAT = {'type': 'json_schema', 'json_schema': {'name': 'items', 'schema': SCHEMA}}
SENTENCE = 'The river runs past the mill, and the mill grinds the corn of the village. '
REQUESTS_PER_CLIENT = 3
MAX_TOKENS = 120
HOSTILE_CLIENTS, HOSTILE_REQUESTS = 8, 200
# Time for hostile clients to fill the queue of grammars, and for it to be empty again.
ATTACK_SECONDS = 3.0


def main(argv: list[str]) -> int:
    """Measures all settings, prints a line for each, and writes JSON."""
    parser = ArgumentParser(prog='benchmarks.serve_options', allow_abbrev=False, description=__doc__)
    parser.add_argument('--checkpoint', type=Path, required=True, help='run to serve')
    parser.add_argument('--clients', default='1,8', help='numbers of clients, with commas between them (default 1,8)')
    parser.add_argument('--num-draft-tokens', type=int, default=8, help='of the second server (default 8)')
    parser.add_argument('--rounds', type=int, default=5, help='turns of each setting (default 5)')
    parser.add_argument('--output', type=Path, help='JSON file to write')
    options = parser.parse_args(argv)
    if not 1 <= options.num_draft_tokens <= MAX_DRAFT_TOKENS:
        raise InputError(f'--num-draft-tokens={options.num_draft_tokens}: must be from 1 to {MAX_DRAFT_TOKENS}')
    if options.rounds < 1:
        raise InputError(f'--rounds={options.rounds}: must be at least 1')
    if not all(part.isdigit() and int(part) for part in options.clients.split(',')):
        raise InputError(f'--clients={options.clients}: must be positive numbers, with commas between them')
    plain = Server(options.checkpoint)
    try:
        hostile = measure_hostile(plain, options.rounds)
        drafting = Server(options.checkpoint, f'--num-draft-tokens={options.num_draft_tokens}')
        try:
            clients = [int(part) for part in options.clients.split(',')]
            results = [measure(plain, drafting, number, options.rounds) for number in clients]
        finally:
            drafting.end()
    finally:
        plain.end()
    for result in results:
        print(
            f'{result["clients"]} clients: {result["plain"]:.0f} tokens/s, with drafts {result["drafts"]:.0f} '
            f'(ratio {result["draft_ratio"]:.2f}, {result["accepted_per_pass"]:.2f} accepted tokens per pass); '
            f'time per token with a grammar: ratio {result["grammar_ratio"]:.2f}'
        )
    for name in ('p50', 'p99'):
        idle, attacked = hostile['idle'][name], hostile['attacked'][name]
        print(f'hostile schemas: {name} {idle:.4f} s idle, {attacked:.4f} s attacked (ratio {attacked / idle:.2f})')
    if options.output:
        found = {
            'machine': machine(),
            'num_draft_tokens': options.num_draft_tokens,
            'results': results,
            'hostile': hostile,
        }
        options.output.write_text(json.dumps(found, indent=1) + '\n')
    return EXIT_DONE


def measure(plain: Server, drafting: Server, clients: int, rounds: int) -> dict[str, Any]:
    """Returns the median rates in tokens per second of all settings for one number of clients, and their ratios."""
    settings: dict[str, tuple[Server, dict[str, Any]]] = {
        'plain': (plain, {'ignore_eos': True}),
        'drafts': (drafting, {'ignore_eos': True}),
        'grammar': (plain, {'response_format': RESPONSE_FORMAT, 'temperature': 1.0}),
        'sampled': (plain, {'ignore_eos': True, 'temperature': 1.0}),
    }
    turns: dict[str, list[float]] = {name: [] for name in settings}
    for server, fields in settings.values():
        rate(server, clients, fields)
    before = counters(drafting)
    for _ in range(rounds):
        for name, (server, fields) in settings.items():
            turns[name].append(rate(server, clients, fields))
    after = counters(drafting)
    medians = {name: statistics.median(rates) for name, rates in turns.items()}
    accepted = after['maxlm_tokens_total{kind="accepted"}'] - before['maxlm_tokens_total{kind="accepted"}']
    return {
        'clients': clients,
        **medians,
        'draft_ratio': medians['drafts'] / medians['plain'],
        'grammar_ratio': medians['sampled'] / medians['grammar'],
        'accepted_per_pass': accepted / (after['maxlm_passes_total'] - before['maxlm_passes_total']),
        'turns': turns,
    }


def measure_hostile(server: Server, rounds: int) -> dict[str, Any]:
    """Returns quantiles of the latency of requests without a schema, with and without hostile clients."""
    seconds: dict[str, list[float]] = {'idle': [], 'attacked': []}
    latencies(server)
    for _ in range(rounds):
        seconds['idle'] += latencies(server)
        command = [sys.executable, '-m', 'benchmarks.hostile_schemas', *map(str, server.address), str(HOSTILE_CLIENTS)]
        clients = subprocess.Popen(['nice', '-n', '19', *command], stderr=subprocess.DEVNULL)
        try:
            time.sleep(ATTACK_SECONDS)
            seconds['attacked'] += latencies(server)
        finally:
            clients.kill()
            clients.wait()
        # Compilations end when their clients have left.
        time.sleep(ATTACK_SECONDS)
    quantiles = {name: statistics.quantiles(values, n=100) for name, values in seconds.items()}
    return {
        'clients': HOSTILE_CLIENTS,
        'requests': len(seconds['idle']),
        **{name: {'p50': values[49], 'p99': values[98]} for name, values in quantiles.items()},
        'p50_ratio': quantiles['attacked'][49] / quantiles['idle'][49],
        'p99_ratio': quantiles['attacked'][98] / quantiles['idle'][98],
    }


def latencies(server: Server) -> list[float]:
    """Returns the latencies of successive requests of one client."""
    seconds = []
    for _ in range(HOSTILE_REQUESTS):
        start = time.perf_counter()
        send(server, {'prompt': SENTENCE, 'max_tokens': 64, 'temperature': 0, 'ignore_eos': True})
        seconds.append(time.perf_counter() - start)
    return seconds


def send(server: Server, body: dict[str, Any]) -> int:
    """Returns the number of tokens of a completion."""
    connection = http.client.HTTPConnection(*server.address, timeout=600)
    connection.request('POST', '/v1/completions', json.dumps(body), {'Content-Type': 'application/json'})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    if response.status != 200:
        raise SystemExit(f'the server answered {response.status}: {text[:500]}')
    return int(json.loads(text)['usage']['completion_tokens'])


def rate(server: Server, clients: int, fields: dict[str, Any]) -> float:
    """Returns the tokens per second of `clients` concurrent clients."""

    def request(number: int) -> int:
        body = {
            'prompt': SENTENCE[number % 20 :] + SENTENCE * 2,
            'max_tokens': MAX_TOKENS,
            'temperature': 0,
            'seed': number,
        }
        return send(server, {**body, **fields})

    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        start = time.perf_counter()
        num_tokens = sum(pool.map(request, range(clients * REQUESTS_PER_CLIENT)))
        return num_tokens / (time.perf_counter() - start)


def counters(server: Server) -> dict[str, float]:
    """Returns the metrics of the server by name and labels."""
    connection = http.client.HTTPConnection(*server.address, timeout=60)
    connection.request('GET', '/metrics')
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return {name: float(value) for name, value in (line.rsplit(' ', 1) for line in lines if not line.startswith('#'))}


def run() -> None:
    """Entry point of `python -m benchmarks.serve_options`."""
    sys.exit(exit_code(main, sys.argv[1:]))


if __name__ == '__main__':
    run()
