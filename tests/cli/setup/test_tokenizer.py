"""`maxlm tokenizer`: a table of bytes per token."""

import pytest

from maxlm.cli.setup.tokenizer import main
from maxlm.data.compression.bytes_per_token import KINDS, sample_texts
from maxlm.data.tokenizer.tokenizer import TOKENIZER_FILE, chars_tokenizer, ids_tokenizer
from maxlm.errors import EXIT_DONE, InputError
from maxlm.formatting import DASH


def test_several_tokenizers_beside_the_published_ones(tmp_path, capsys):
    tokenizer = chars_tokenizer([sample_texts()['chinese']])
    tokenizer.save(tmp_path / TOKENIZER_FILE)
    assert main(['bytes', str(tmp_path)]) == EXIT_DONE
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == [
        *('bytes', 'per', 'token', 'bytes', '(257', 'ids)'),
        *(str(tmp_path), f'({tokenizer.vocab_size}', 'ids)', 'GPT-2', 'cl100k_base'),
    ]
    assert [row.split('  ')[0] for row in rows] == list(KINDS.values())
    values = {row.split()[0]: row.split()[-4:] for row in rows}
    assert values['English'] == ['1.00', DASH, '4.48', '4.69']
    text = sample_texts()['chinese']
    assert values['Chinese'] == ['1.00', f'{len(text.encode()) / len(text):.2f}', '1.38', '2.42']


@pytest.mark.parametrize('name', ['bpe:300', 'chars', 'missing.json', 'numbers', 'empty'])
def test_names_without_a_tokenizer_of_text(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ids_tokenizer(9, 8).save('numbers')
    (tmp_path / 'empty').mkdir()
    with pytest.raises(InputError, match=f'{name}.*; '):
        main([name])
