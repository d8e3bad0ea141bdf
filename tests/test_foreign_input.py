"""Untrusted JSON is only parsed by a function that limits size and depth."""

import ast

import pytest

from tests.conftest import ROOT

PACKAGE = ROOT / 'maxlm'
PARSER = 'storage/json_text.py'
# Files that parse JSON without the limits of `parse_json`, with reasons.
OWN_MESSAGES = {
    'data/tokenizer/tiktoken_bpe.py': 'a tokenizer in memory',
    'data/chat/template_process.py': 'pipe to the process that renders chat templates',
    'data/tokenizer/longest_token.py': 'a tokenizer in memory',
    'data/tokenizer/limited_encoding.py': 'pipe to the process that encodes texts',
    'data/tokenizer/limits/expansion.py': 'a tokenizer in memory',
    'data/prepare/options.py': 'options that were written as JSON before',
    'data/tokenizer/tokenizer.py': 'a tokenizer in memory',
    'data/tokenizer/extension.py': 'tokenizers in memory',
    'data/tokenizer/special_pieces.py': 'a tokenizer in memory',
    'diagnostics/jax_subprocess.py': 'output of a child process that runs our own program',
    'sandbox/process/server.py': 'command line of a limited process',
    'sandbox/program/rpc_protocol.py': 'pipe to the supervisor of a sandbox',
    'sandbox/monitor.py': 'pipe from the supervisor of a sandbox',
    'sandbox/fork.py': 'pipe between processes of a sandbox',
    'sandbox/pool.py': 'pipe from the supervisor of a sandbox',
    'sandbox/worker.py': 'command line from the pool of sandboxes',
    'sandbox/program/function_call.py': 'pipe from the pool of sandboxes',
    'inference/engine/grammar_worker.py': 'vocabulary from the process of the engine',
    'rl/environments/first_process.py': 'broadcast between the processes of a run',
    'rl/rewards/reward_process.py': 'pipe between a run and the process of its rewards',
    'checkpoint/manager.py': 'broadcast between the processes of a run',
    'runtime/heartbeat.py': 'key-value store of the processes of a run',
    'telemetry/wandb.py': 'pipe from the parent process',
}


def parses_json(source):
    """Returns True if a source text refers to `json.load` or `json.loads` under any name."""
    nodes = list(ast.walk(ast.parse(source)))
    attributes = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == 'json'
    }
    names = {
        alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module == 'json'
        for alias in node.names
    }
    renamed = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names if alias.asname}
    return bool((attributes | names) & {'load', 'loads', 'JSONDecoder'} or 'json' in renamed)


def test_foreign_json_is_parsed_in_one_place():
    paths = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob('*.py')}
    found = {name for name, path in paths.items() if parses_json(path.read_text())}
    # The sets must be equal, so that obsolete exceptions are removed.
    assert found == {PARSER, *OWN_MESSAGES}


@pytest.mark.parametrize(
    ('source', 'found'),
    [
        ('import json\njson.loads(text)', True),
        ('import json\nread = json.load', True),
        ('from json import loads', True),
        ('import json as js\njs.loads(text)', True),
        ('import json\njson.JSONDecoder().decode(text)', True),
        ('import json\njson.dumps(value)', False),
        ('from json import dumps', False),
        ('from maxlm.storage.json_text import parse_json\nparse_json(text)', False),
    ],
)
def test_a_call_would_be_found(source, found):
    assert parses_json(source) is found
