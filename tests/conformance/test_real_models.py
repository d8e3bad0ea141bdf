"""Takes two published models through maxlm: texts, losses, server, quantization, export and fine-tuning.

Expected values come from Transformers, PEFT and llama.cpp. The models come from packages (see `real_models`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openai
import pytest
from safetensors import safe_open

from benchmarks.step import machine
from maxlm.checkpoint.fetch import find_local_step
from maxlm.checkpoint.streaming import ParamsReader
from maxlm.storage.json_text import parse_json
from tests.conformance.real_models import (
    GEMMA3,
    ROOT,
    SMOLLM2,
    clean_environment,
    package_directory,
    run_process,
)
from tests.conformance.real_models_prompts import DOCUMENT, TUNING, WINDOW, requests

pytestmark = pytest.mark.nightly

MODELS = {'smollm2': SMOLLM2, 'gemma3': GEMMA3}
# Largest difference of logits between two programs, measured: 1e-4.
LOGITS = 1e-3
LOSS = 1e-4
VERSIONS = {package: version(package) for package in ('torch', 'transformers', 'tokenizers', 'peft')}
# Every fourth request is sent to the server: texts and, for chat models, conversations.
SERVED = slice(None, None, 4)


class Imported(NamedTuple):
    """A published model, its import, and what Transformers computes for it."""

    gguf: Path
    original: Path
    workdir: Path
    requests: list[dict[str, Any]]
    expected: dict[str, Any]
    logits: np.ndarray

    @property
    def is_chat(self) -> bool:
        return (self.original / 'chat_template.jinja').is_file()


@pytest.fixture
def record(model):
    """Returns a function that records a figure of a model in the file of $MAXLM_REAL_MODELS_OUTPUT, if it is set."""
    path = os.environ.get('MAXLM_REAL_MODELS_OUTPUT')

    def write(name: str, value: float) -> None:
        if path is None:
            return
        file = Path(path)
        facts = (
            parse_json(file.read_bytes())
            if file.is_file()
            else {'machine': {**machine(), 'devices': 1, **VERSIONS}, 'models': {}}
        )
        facts['models'].setdefault(model.original.name, {})[name] = float(f'{value:.3g}')
        file.write_text(json.dumps(facts, indent=1) + '\n')

    return write


@pytest.fixture(scope='module', params=MODELS)
def model(request, tmp_path_factory):
    original = MODELS[request.param].directory
    folder = tmp_path_factory.mktemp(request.param)
    run_maxlm('hf', 'import', '--input', original, '--output', folder / 'imported')
    run_process('tests.conformance.real_models_reference', 'answers', original, folder / 'expected.json')
    expected = parse_json((folder / 'expected.json').read_bytes())
    is_chat = (original / 'chat_template.jinja').is_file()
    answers = requests(has_template=is_chat)
    logits = np.load(folder / 'expected.npy')
    return Imported(MODELS[request.param].gguf, original, folder / 'imported', answers, expected, logits)


def run_maxlm(*arguments: object) -> str:
    """Runs a command of maxlm in a process of its own; returns its standard output."""
    return run_process('maxlm', *arguments)


def different(requests: list[Any], found: list[Any], wanted: list[Any]) -> dict[str, tuple[Any, Any]]:
    """Returns the found and the expected value of each request with a difference."""
    return {
        str(request)[:100]: (one, other)
        for request, one, other in zip(requests, found, wanted, strict=True)
        if one != other
    }


def column(rows: list[dict[str, Any]], key: str) -> list[Any]:
    return [row[key] for row in rows]


def test_greedy_texts_logits_and_loss_equal_transformers(model, tmp_path, record):
    run_process('tests.conformance.real_models_maxlm', 'answers', model.workdir, tmp_path / 'found.json')
    found = parse_json((tmp_path / 'found.json').read_bytes())
    for key in ('ids', 'text'):
        rows = column(found['requests'], key), column(model.expected['requests'], key)
        assert different(model.requests, *rows) == {}
    assert max(len(row['ids']) for row in model.expected['requests']) > 1_300
    assert found['stops'] == model.expected['stops']
    # Control: answers end at a stop token, so that a model that ignores it would continue.
    assert not model.is_chat or any(column(model.expected['requests'], 'is_stopped'))
    logits = np.load(tmp_path / 'found.npy')
    largest = float(np.max(np.abs(logits - model.logits)))
    record('largest_logit_difference', largest)
    record('loss_difference', found['loss'] - model.expected['loss'])
    record('equal_texts', len(found['requests']))
    assert largest < LOGITS
    assert found['loss'] == pytest.approx(model.expected['loss'], abs=LOSS)


def test_the_published_gguf_file_is_the_same_model(model, tmp_path, record):
    run_maxlm('hf', 'import', '--input', model.gguf, '--output', tmp_path / 'imported')
    readers = [ParamsReader(find_local_step(str(workdir))) for workdir in (model.workdir, tmp_path / 'imported')]
    assert readers[0].shapes == readers[1].shapes
    assert [path for path in readers[0].shapes if not np.array_equal(*(each.read(path) for each in readers))] == []
    # Quantized weights are trained and run in bfloat16, and Transformers computed the texts in float32.
    config = tmp_path / 'imported' / 'config.json'
    config.write_text(config.read_text().replace('"dtype": "bfloat16"', '"dtype": "float32"'))
    run_process('tests.conformance.real_models_maxlm', 'answers', tmp_path / 'imported', tmp_path / 'found.json')
    found = parse_json((tmp_path / 'found.json').read_bytes())
    rows = list(zip(found['requests'], model.expected['requests'], strict=True))
    # Transformers does not read from the file of SmolLM2 that numbers are split into digits.
    alike = [(one, other) for one, other in rows if one['ids'] == other['ids']]
    assert len(alike) >= len(rows) - 2
    assert [one['text'] for one, _ in alike] == [other['text'] for _, other in alike]
    # Control: llama.cpp reads the tokenizer of the file itself.
    (tmp_path / 'requests.json').write_text(json.dumps(model.requests))
    run_process(
        'tests.conformance.real_models_llama_cpp',
        *(model.gguf, tmp_path / 'requests.json', tmp_path / 'llama_cpp.json'),
        pythonpath=[package_directory('xllamacpp')],
    )
    counts = column(parse_json((tmp_path / 'llama_cpp.json').read_bytes()), 'prompt_tokens')
    assert counts == [len(row['ids']) for row in found['requests']]
    record('equal_texts_of_published_gguf', len(alike))


# The files have 4-bit weights with a scale and a minimum for every 32 values. int4 has no minimum, so it rounds again.
@pytest.mark.parametrize(('weights', 'limit'), [('int8', 0.01), ('int4', 0.2)])
def test_loss_of_quantized_weights(model, weights, limit, tmp_path, record):
    run_process('tests.conformance.real_models_maxlm', 'loss', model.workdir, weights, tmp_path / 'loss.json')
    loss = parse_json((tmp_path / 'loss.json').read_bytes())['loss']
    record(f'relative_{weights}_loss_difference', loss / model.expected['loss'] - 1)
    assert loss == pytest.approx(model.expected['loss'], rel=limit)
    # Control: rounded weights cannot give the same loss.
    assert abs(loss - model.expected['loss']) > 1e-6


def test_export_equals_the_original(model, tmp_path):
    output = tmp_path / 'exported'
    options = ('--dtype', 'float32', '--max-shard-size', '2GB')
    run_maxlm('hf', 'export', '--checkpoint', model.workdir, '--output', output, *options)
    for path in model.original.iterdir():
        copy = output / path.name
        if path.suffix == '.json':
            assert parse_json(copy.read_bytes()) == parse_json(path.read_bytes()), path.name
        elif path.suffix == '.jinja':
            assert copy.read_bytes() == path.read_bytes()
        else:
            assert path.name == 'model.safetensors'
    with (
        safe_open(model.original / 'model.safetensors', 'np') as before,
        safe_open(output / 'model.safetensors', 'np') as after,
    ):
        names = set(before.keys())
        assert set(after.keys()) == names
        assert [name for name in names if not np.array_equal(before.get_tensor(name), after.get_tensor(name))] == []


def test_llama_cpp_continues_the_exported_gguf_with_the_same_texts(model, tmp_path, record):
    library = package_directory('xllamacpp')
    run_maxlm('hf', 'export-gguf', '--checkpoint', model.workdir, '--output', tmp_path / 'model.gguf', '--dtype', 'f32')
    (tmp_path / 'requests.json').write_text(json.dumps(model.requests))
    run_process(
        'tests.conformance.real_models_llama_cpp',
        *(tmp_path / name for name in ('model.gguf', 'requests.json', 'found.json')),
        pythonpath=[library],
    )
    found, expected = parse_json((tmp_path / 'found.json').read_bytes()), model.expected['requests']
    assert different(model.requests, column(found, 'prompt_tokens'), [len(row['ids']) for row in expected]) == {}
    assert different(model.requests, column(found, 'text'), column(expected, 'text')) == {}
    record('equal_texts_of_llama_cpp', len(found))


@pytest.fixture
def client(model):
    """Yields an OpenAI client of `maxlm serve` in another process."""
    command = [sys.executable, '-m', 'maxlm', 'serve', f'--checkpoint={model.workdir}', '--port=0']
    with subprocess.Popen(
        [*command, '--slots=2', '--max-model-len=2048', '--served-model-name=real'],
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment(),
        cwd=ROOT,
    ) as server:
        lines = iter(server.stdout.readline, '')
        address = next(found[1] for line in lines if (found := re.search(r'serving real .* at (http\S+)', line)))
        with openai.OpenAI(base_url=f'{address.rstrip("/")}/v1', api_key='none', max_retries=0, timeout=300) as client:
            yield client
        server.terminate()
        assert server.wait(60) == 0


def test_server_answers_the_openai_client_with_the_same_texts(model, client, record):
    pairs = list(zip(model.requests, model.expected['requests'], strict=True))[SERVED]
    if model.is_chat:
        assert {'text', 'messages'} <= {key for request, _ in pairs for key in request}
    for request, expected in pairs:
        common = {'model': 'real', 'temperature': 0, 'max_tokens': request['max_tokens']}
        if 'text' in request:
            done = client.completions.create(prompt=request['text'], **common)
            text = done.choices[0].text
            parts = [
                chunk.choices[0].text
                for chunk in client.completions.create(prompt=request['text'], stream=True, **common)
            ]
        else:
            done = client.chat.completions.create(messages=request['messages'], **common)
            text = done.choices[0].message.content
            stream = client.chat.completions.create(messages=request['messages'], stream=True, **common)
            parts = [chunk.choices[0].delta.content or '' for chunk in stream]
        assert text == ''.join(parts) == expected['text']
        assert done.choices[0].finish_reason == ('stop' if expected['is_stopped'] else 'length')
        assert done.usage.prompt_tokens == len(expected['ids'])
        # A stop token is not counted.
        assert done.usage.completion_tokens == expected['completion_tokens'] - expected['is_stopped']
    record('equal_texts_of_server', len(pairs))


def test_first_loss_of_lora_equals_peft(model, tmp_path, record):
    run_process('tests.conformance.real_models_reference', 'tuning_loss', model.original, tmp_path / 'expected.json')
    expected = parse_json((tmp_path / 'expected.json').read_bytes())
    rows = [{'messages': messages} for messages in TUNING] if model.is_chat else [{'text': DOCUMENT}]
    (tmp_path / 'input.jsonl').write_text(''.join(f'{json.dumps(row)}\n' for row in rows))
    packed = ['--format', 'chat', '--pack-seq-len', WINDOW] if model.is_chat else []
    tokenizer = model.workdir / 'tokenizer.json'
    run_maxlm(
        *('prepare', '--input', tmp_path / 'input.jsonl', '--output', tmp_path / 'data', '--tokenizer', tokenizer),
        *('--validation-fraction', 0, '--workers', 1, *packed),
    )
    run_maxlm(
        *('train', f'--config={model.workdir}/config.json', f'--workdir={tmp_path}/tuned'),
        *(f'--config.train.init_from={model.workdir}', f'--config.data.path={tmp_path}/data'),
        *(f'--config.data.seq_len={WINDOW}', '--config.train.num_steps=1', '--config.train.global_batch_size=1'),
        *('--config.model.lora_rank=8', '--config.train.log_every=1'),
    )
    first = parse_json((tmp_path / 'tuned' / 'metrics.jsonl').read_text().splitlines()[0])
    record('lora_first_loss_difference', first['train/loss'] - expected['loss'])
    assert first['train/loss'] == pytest.approx(expected['loss'], abs=LOSS)
