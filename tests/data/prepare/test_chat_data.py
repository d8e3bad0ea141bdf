"""Tests conversations from files to batches."""

import dataclasses
import hashlib
import json
import random
import re
import shutil

import numpy as np
import pytest

from maxlm.config.schema import DataConfig
from maxlm.data.chat import template_process
from maxlm.data.chat.template import CHATML
from maxlm.data.chat.token_flags import is_target, token_ids
from maxlm.data.dataset.records import load_manifest, verify
from maxlm.data.dataset.token_reader import TokenReader
from maxlm.data.loader.dataset import open_training_data
from maxlm.data.loader.windows import Sequences
from maxlm.data.prepare import partitions
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, InputError
from maxlm.sandbox.limited_process import ProcessLimits
from tests.preparing import contents, documents_of, run, write_texts

WORDS = ['red', 'green', 'blue', '<|im_end|>', '<|im_start|>assistant', '🙂', 'größe']


def turns(rng, count):
    """Returns unique questions and answers; only answers contain capital letters."""
    texts = [' '.join(rng.choices(WORDS, k=rng.randrange(1, 12))) for _ in range(2 * count)]
    return [
        (question, f'A{rng.randrange(10**9)} {answer}')
        for question, answer in zip(texts[::2], texts[1::2], strict=True)
    ]


def record(rng, kind, count=2):
    """Returns a record of a format and its answers."""
    turn_pairs = turns(rng, 1 if kind == 'alpaca' else count)
    if kind == 'openai':
        messages = [{'role': 'system', 'content': 'Be kind.'}]
        for question, answer in turn_pairs:
            messages += [{'role': 'user', 'content': question}, {'role': 'assistant', 'content': answer}]
        entry = {'messages': messages}
    elif kind == 'sharegpt':
        pairs = [({'from': 'human', 'value': q}, {'from': 'gpt', 'value': a}) for q, a in turn_pairs]
        entry = {'conversations': [message for pair in pairs for message in pair]}
    else:
        entry = {'instruction': turn_pairs[0][0], 'input': 'x', 'output': turn_pairs[0][1]}
    return entry, [answer for _, answer in turn_pairs]


def write(path, kinds, count=40, seed=4, longest=5):
    """Writes a file with records of alternating formats, and returns all answers."""
    rng = random.Random(seed)
    made = [record(rng, kinds[i % len(kinds)], rng.randrange(1, longest)) for i in range(count)]
    path.write_text(''.join(json.dumps(entry, ensure_ascii=False) + '\n' for entry, _ in made))
    return [answer for _, answers in made for answer in answers]


def prepare(source, output, *options):
    arguments = ['--input', source, '--output', output, '--workers', 1, '--quiet', '--validation-fraction', 0.2]
    return run(*arguments, *(options if '--tokenizer' in options else (*options, '--tokenizer', 'bpe:300')))


def target_texts(dataset, tokens, predicted):
    tokenizer = Tokenizer.load(dataset.tokenizer_path)
    cuts = np.flatnonzero(np.diff(predicted, prepend=False, append=False))
    return [tokenizer.decode(tokens[a:b]) for a, b in zip(cuts[::2], cuts[1::2], strict=True)]


def targets_in_shards(dataset):
    found = []
    for split in dataset.splits.values():
        reader = TokenReader(dataset, split.shards)
        for number, shard in enumerate(split.shards):
            stream = reader.read(number, 0, shard.tokens)
            found += target_texts(dataset, token_ids(stream), is_target(stream))
    return found


def targets_in_batches(corpus, batches, num):
    """Returns the text of the targets with weight 1, row by row."""
    found = []
    for step in range(num):
        batch = batches[step]
        assert set(np.unique(batch['weights'])) <= {0.0, 1.0}
        for row in range(len(batch['tokens'])):
            np.testing.assert_array_equal(batch['targets'][row, :-1], batch['tokens'][row, 1:])
            found += target_texts(corpus.first, batch['targets'][row], batch['weights'][row] > 0)
    return found


@pytest.mark.parametrize('kinds', [['openai'], ['sharegpt'], ['alpaca'], ['openai', 'sharegpt', 'alpaca']])
def test_only_answers_are_targets(tmp_path, kinds):
    answers = write(tmp_path / 'x.jsonl', kinds)
    assert prepare(tmp_path / 'x.jsonl', tmp_path / 'data') == EXIT_DONE
    dataset = load_manifest(tmp_path / 'data')
    verify(dataset)
    assert (dataset.masked, dataset.dtype, dataset.packed_window, dataset.vocab_size) == (True, 'uint32', 0, 302)
    assert sorted(targets_in_shards(dataset)) == sorted(f'{answer}<|im_end|>' for answer in answers)
    assert sum(split.documents for split in dataset.splits.values()) == 40
    assert sum(dataset.chat[name]['predicted'] for name in dataset.splits) > 0
    (dataset.path / 'chat_template.jinja').write_text('other')
    with pytest.raises(InputError, match=r'chat_template\.jinja is damaged'):
        verify(dataset)


@pytest.mark.multiprocess
def test_any_number_of_workers_gives_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(partitions, 'MIN_GROUP_BYTES', 3000)
    write(tmp_path / 'x.jsonl', ['openai', 'alpaca'], count=80)
    for workers in (1, 2):
        assert (
            prepare(tmp_path / 'x.jsonl', tmp_path / str(workers), '--pack-seq-len', 128, '--workers', workers)
            == EXIT_DONE
        )
    first = contents(tmp_path / '1')
    assert len([name for name in first if name.startswith('train-')]) >= 4
    assert first == contents(tmp_path / '2')
    write(tmp_path / 'x.jsonl', ['openai', 'alpaca'], count=80, seed=5)
    assert prepare(tmp_path / 'x.jsonl', tmp_path / 'other', '--pack-seq-len', 128) == EXIT_DONE
    assert contents(tmp_path / 'other') != first


def test_packed_windows_contain_complete_conversations(tmp_path):
    answers = write(tmp_path / 'x.jsonl', ['openai', 'sharegpt'])
    assert prepare(tmp_path / 'x.jsonl', tmp_path / 'data', '--pack-seq-len', 512) == EXIT_DONE
    dataset = load_manifest(tmp_path / 'data')
    assert dataset.packed_window == 512
    assert sorted(targets_in_shards(dataset)) == sorted(f'{answer}<|im_end|>' for answer in answers)
    corpus = open_training_data(DataConfig(path=str(tmp_path / 'data'), seq_len=512, seed=3))
    batches = corpus.train_batches(2)
    steps = -(-corpus.training_windows // 2)
    targets = targets_in_batches(corpus, batches, steps)
    validation = targets_in_batches(corpus, corpus.validation_batches(1), len(corpus.validation_batches(1)))
    assert {*targets, *validation} == {f'{answer}<|im_end|>' for answer in answers}
    # Each segment except padding starts with the first token of a conversation.
    tokenizer = Tokenizer.load(dataset.tokenizer_path)
    start = tokenizer.with_special_tokens(['<|im_start|>']).special_tokens
    for row in range(2):
        batch = batches[0]
        firsts = batch['tokens'][row][batch['positions'][row] == 0]
        names = {start[i].content for i in firsts.tolist()}
        assert names <= {'<|im_start|>', '<|endoftext|>'}
        assert '<|im_start|>' in names
    other = open_training_data(DataConfig(path=str(tmp_path / 'data'), seq_len=512, seed=4)).train_batches(2)
    assert any((other[i]['tokens'] != batches[i]['tokens']).any() for i in range(steps))


def test_sequence_lengths_other_than_the_packed_length_are_rejected(tmp_path):
    write(tmp_path / 'x.jsonl', ['alpaca'])
    assert prepare(tmp_path / 'x.jsonl', tmp_path / 'data', '--pack-seq-len', 128) == EXIT_DONE
    config = DataConfig(path=str(tmp_path / 'data'), seq_len=128)
    assert open_training_data(config).training_windows > 0
    for changed, words in (
        ({'seq_len': 64}, ['data.seq_len=64', 'sequences of 128 tokens', '--pack-seq-len=64']),
        ({'seq_len_schedule': ((64, 0.5),)}, ['data.seq_len_schedule', 'sequences of 128 tokens']),
        ({'seq_len': 64, 'sources': ((str(tmp_path / 'data'), 1.0),)}, ['data.seq_len=64']),
    ):
        with pytest.raises(InputError) as info:
            open_training_data(dataclasses.replace(config, **changed))
        assert all(word in str(info.value) for word in words)


def test_masks_are_kept_in_mixtures_with_texts(tmp_path):
    answers = write(tmp_path / 'x.jsonl', ['openai'])
    assert prepare(tmp_path / 'x.jsonl', tmp_path / 'chats', '--pack-seq-len', 256) == EXIT_DONE
    texts = write_texts(tmp_path / 'texts')
    tokenizer = ('--tokenizer', tmp_path / 'chats' / 'tokenizer.json')
    assert prepare(texts, tmp_path / 'plain', *tokenizer) == EXIT_DONE
    plain = load_manifest(tmp_path / 'plain')
    assert (plain.masked, plain.dtype) == (False, 'uint16')
    assert not (plain.path / 'chat_template.jinja').exists()
    for names in (('chats', 'plain'), ('plain', 'chats')):
        sources = tuple((str(tmp_path / name), 0.5) for name in names)
        corpus = open_training_data(DataConfig(sources=sources, seq_len=256))
        batches = corpus.train_batches(8)
        targets = set()
        for step in range(8):
            batch = batches[step]
            alone = {name: Sequences(load_manifest(tmp_path / name), 'train', 256) for name in names}
            for row, source in enumerate(batch['sources'].tolist()):
                place = batches.order.locate(8 * step + row)
                expected = alone[names[source]][place[1]]
                for key, values in expected.items():
                    np.testing.assert_array_equal(batch[key][row], values, err_msg=key)
                if names[source] == 'chats':
                    targets.update(target_texts(corpus.first, batch['targets'][row], batch['weights'][row] > 0))
        assert {0, 1} == set(batch['sources'].tolist())
        assert targets
        assert targets <= {f'{answer}<|im_end|>' for answer in answers}


def test_windows_without_packing_split_conversations_but_keep_masks(tmp_path):
    write(tmp_path / 'x.jsonl', ['openai'])
    assert prepare(tmp_path / 'x.jsonl', tmp_path / 'data') == EXIT_DONE
    dataset = load_manifest(tmp_path / 'data')
    (shard,) = dataset.splits['train'].shards
    stream = TokenReader(dataset, [shard]).read(0, 0, shard.tokens)
    windows = Sequences(dataset, 'train', 64)
    rows = [windows[number] for number in range(len(windows))]
    predicted = np.concatenate([row['weights'] for row in rows])[: shard.tokens - 1] > 0
    np.testing.assert_array_equal(predicted, is_target(stream)[1:])
    targets = np.concatenate([row['targets'] for row in rows])[: shard.tokens - 1]
    np.testing.assert_array_equal(targets, token_ids(stream)[1:])
    # Splits the sequences again, as a schedule of sequence lengths does.
    cut = windows.batch([windows.stream(number) for number in range(len(windows))], num_splits=4)
    np.testing.assert_array_equal(cut['weights'].reshape(-1)[: shard.tokens - 1] > 0, is_target(stream)[1:])
    assert cut['positions'].max() < 16
    long, joined = (Sequences(dataset, 'train', 512, isolate_documents=isolate)[0] for isolate in (True, False))
    assert joined['segments'].max() == 1 < long['segments'].max()
    np.testing.assert_array_equal(joined['weights'], long['weights'])


def test_long_conversations_are_truncated_counted_and_reported(tmp_path, capsys):
    write(tmp_path / 'x.jsonl', ['openai'], longest=12)
    arguments = ['--input', tmp_path / 'x.jsonl', '--tokenizer', 'bytes', '--workers', 1, '--validation-fraction', 0.2]
    assert run(*arguments, '--output', tmp_path / 'data', '--pack-seq-len', 200) == EXIT_DONE
    dataset = load_manifest(tmp_path / 'data')
    counts = [dataset.chat[name] for name in ('train', 'validation')]
    assert min(counts[0].values()) > 0
    kept = sum(split.documents for split in dataset.splits.values())
    assert kept + sum(count['left_out'] for count in counts) == 40
    out = capsys.readouterr().out
    assert f'{counts[0]["shortened"]} conversations are longer than a sequence' in out
    assert f'{counts[0]["left_out"]} are skipped because none of their turns fits' in out
    assert run(*arguments, '--output', tmp_path / 'none', '--pack-seq-len', 8) == EXIT_BAD_INPUT
    assert '--pack-seq-len=8: no turn of any conversation fits' in capsys.readouterr().err


def test_texts_and_conversations_in_one_file(tmp_path, capsys):
    lines = [{'messages': [{'role': 'user', 'content': 'q'}, {'role': 'assistant', 'content': 'Answer'}]}]
    lines += [{'text': 'plain'}, {'instruction': 'i', 'output': 'Output', 'text': 'all of it'}]
    path = tmp_path / 'x.jsonl'
    path.write_text('\n'.join(map(json.dumps, lines)))
    options = ['--validation-fraction', 0, '--tokenizer', 'bytes']
    assert prepare(path, tmp_path / 'auto', *options) == EXIT_DONE
    targets = targets_in_shards(load_manifest(tmp_path / 'auto'))
    # The first token of a text is a target, so it continues the target at the end of the text before it.
    assert targets == ['Answer<|im_end|>', 'plain<|endoftext|>all of it<|endoftext|>']
    assert prepare(path, tmp_path / 'chat', *options, '--format', 'chat') == EXIT_BAD_INPUT
    assert f'{path}:2: no conversation: a record must have "messages"' in capsys.readouterr().err
    assert prepare(path, tmp_path / 'chat', *options, '--format', 'chat', '--skip-bad-records') == EXIT_DONE
    dataset = load_manifest(tmp_path / 'chat')
    assert targets_in_shards(dataset) == ['Answer<|im_end|>', 'Output<|im_end|>']
    assert [entry['name'] for entry in dataset.left_out] == ['x.jsonl:2']
    assert prepare(path, tmp_path / 'text', *options, '--format', 'text') == EXIT_BAD_INPUT
    assert "no text at the key 'text'; it has messages; use --format=chat for conversations" in capsys.readouterr().err
    assert prepare(path, tmp_path / 'text', *options, '--format', 'text', '--skip-bad-records') == EXIT_DONE
    assert documents_of(load_manifest(tmp_path / 'text'), 'train') == ['plain', 'all of it']
    # The existing data set was prepared with other options.
    assert prepare(path, tmp_path / 'chat', *options, '--format', 'text', '--skip-bad-records') == EXIT_BAD_INPUT
    assert 'format chat, not None' in capsys.readouterr().err


def test_records_rejected_by_a_template_are_named_or_skipped(tmp_path, capsys):
    path, template = tmp_path / 'x.jsonl', tmp_path / 'strict.jinja'
    write(path, ['sharegpt', 'openai'], count=4)
    template.write_text(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no systems') }}{% endif %}"
        "{{ '[' + m.role + ']' + m.content + '[/]' }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    options = [
        '--chat-template',
        template,
        '--validation-fraction',
        0,
        '--special-tokens',
        '[/]',
        '[user]',
        '[assistant]',
    ]
    assert prepare(path, tmp_path / 'data', *options[:-4]) == EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert 'without a special token' in error
    assert '--special-tokens' in error
    assert prepare(path, tmp_path / 'data', *options) == EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert 'no systems' in error
    assert 'x.jsonl:' in error
    assert error.count('\n') == 1
    assert prepare(path, tmp_path / 'data', *options, '--skip-bad-records') == EXIT_DONE
    dataset = load_manifest(tmp_path / 'data')
    assert len(dataset.left_out) == 2
    assert {text[-3:] for text in targets_in_shards(dataset)} == {'[/]'}


@pytest.mark.parametrize('spec', ['bytes', 'chars', 'bpe:300'])
def test_any_tokenizer_works(tmp_path, spec):
    answers = write(tmp_path / 'x.jsonl', ['alpaca'], count=8)
    options = ['--tokenizer', spec, '--validation-fraction', 0]
    assert prepare(tmp_path / 'x.jsonl', tmp_path / 'data', *options, '--chat-template', 'llama3') == EXIT_DONE
    dataset = load_manifest(tmp_path / 'data')
    assert targets_in_shards(dataset) == [f'{answer}<|eot_id|>' for answer in answers]
    # The template defines the special tokens, so that it works without the tokenizer.
    assert 'set bos_token = "<|endoftext|>"' in (dataset.path / 'chat_template.jinja').read_text()
    # The tokenizer of a data set includes its template.
    same_tokenizer = ['--tokenizer', dataset.tokenizer_path, '--validation-fraction', 0]
    assert prepare(tmp_path / 'x.jsonl', tmp_path / 'again', *same_tokenizer) == EXIT_DONE
    assert load_manifest(tmp_path / 'again').fingerprint == dataset.fingerprint
    assert prepare(tmp_path / 'x.jsonl', tmp_path / 'other', *same_tokenizer, '--chat-template', 'chatml') == EXIT_DONE
    assert load_manifest(tmp_path / 'other').fingerprint != dataset.fingerprint


def test_the_configuration_next_to_a_tokenizer_is_used(tmp_path):
    answers = write(tmp_path / 'x.jsonl', ['alpaca'], count=4)
    assert prepare(tmp_path / 'x.jsonl', tmp_path / 'first', '--validation-fraction', 0) == EXIT_DONE
    model = tmp_path / 'model'
    model.mkdir()
    shutil.copy(tmp_path / 'first' / 'tokenizer.json', model)
    template = '{{ bos_token }}{% for m in messages %}{{ m.role + m.content + eos_token }}{% endfor %}'
    template += '{% if add_generation_prompt %}assistant{% endif %}'
    config = {'bos_token': {'content': '<|im_start|>'}, 'eos_token': '<eot>', 'chat_template': template}
    (model / 'tokenizer_config.json').write_text(json.dumps(config))
    options = ['--tokenizer', model / 'tokenizer.json', '--validation-fraction', 0]
    assert prepare(tmp_path / 'x.jsonl', tmp_path / 'data', *options) == EXIT_DONE
    dataset = load_manifest(tmp_path / 'data')
    assert targets_in_shards(dataset) == [f'{answer}<eot>' for answer in answers]
    assert dataset.vocab_size == 303


@pytest.mark.parametrize('options', [(), ('--skip-bad-records',)])
def test_a_template_with_endless_loops_stops_the_preparation(tmp_path, capsys, monkeypatch, options):
    monkeypatch.setattr(template_process, '_SHORT', ProcessLimits(cpu_seconds=0.1))
    loops = '{% for a in range(99999) %}' * 2 + '{% endfor %}' * 2
    template = tmp_path / 't.jinja'
    options = ['--tokenizer', 'bytes', '--workers', 1, '--chat-template', template, *options]
    write(tmp_path / 'x.jsonl', ['alpaca'], count=400)
    for source, message in (
        (f'{loops}{CHATML}', 't.jinja: the chat template takes more than 0.1 s of CPU time; fix it'),
        (
            f'{{% if "Hello" not in messages[0].content %}}{loops}{{% endif %}}{CHATML}',
            r'x.jsonl:\d+: the chat template takes more than 0.1 s of CPU time; use another chat template, or remove',
        ),
    ):
        template.write_text(source)
        assert prepare(tmp_path / 'x.jsonl', tmp_path / 'data', *options) == EXIT_BAD_INPUT
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert re.search(message, error)
        assert ('in 4 conversations, the last is' in error) == ('--skip-bad-records' in options and 'x.jsonl' in error)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (['--filter', 'c4'], '--filter=c4 is for text'),
        (['--fim-rate', '0.5'], '--fim-rate=0.5 is for text'),
        (['--format', 'text', '--pack-seq-len', '64'], '--pack-seq-len=64 is for conversations'),
        (['--format', 'text', '--chat-template', 'chatml'], '--chat-template=chatml is for conversations'),
        (['--chat-template', 'none.jinja'], '--chat-template=none.jinja: no such file'),
        (['--pack-seq-len', '-1'], '--pack-seq-len=-1: must be at least 0'),
        (['--tokenizer', 'ids:100'], 'an ids tokenizer encodes only numbers'),
    ],
)
def test_incompatible_options_are_rejected(tmp_path, capsys, options, message):
    write(tmp_path / 'x.jsonl', ['alpaca'], count=4)
    assert prepare(tmp_path / 'x.jsonl', tmp_path / 'data', *options) == EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert message.lower() in error.lower()
    assert error.count('\n') == 1


def test_conversations_require_jsonl(tmp_path, capsys):
    (tmp_path / 'x.txt').write_text('text')
    assert prepare(tmp_path / 'x.txt', tmp_path / 'data', '--format', 'chat') == EXIT_BAD_INPUT
    assert 'x.txt is not JSONL' in capsys.readouterr().err


def test_only_the_completion_is_a_target(tmp_path):
    lines = [{'prompt': f'question {i}? ', 'completion': f'ANSWER {i}'} for i in range(30)]
    (tmp_path / 'x.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    for window in (0, 64):
        output = tmp_path / f'data{window}'
        assert prepare(tmp_path / 'x.jsonl', output, '--tokenizer', 'bytes', '--pack-seq-len', window) == EXIT_DONE
        dataset = load_manifest(output)
        tokenizer = Tokenizer.load(dataset.tokenizer_path)
        targets = ''
        for split in dataset.splits.values():
            for number, shard in enumerate(split.shards):
                stream = TokenReader(dataset, split.shards).read(number, 0, shard.tokens)
                targets += tokenizer.decode(token_ids(stream[is_target(stream)]))
        assert sorted(targets.split('<|endoftext|>')[:-1]) == sorted(line['completion'] for line in lines)


def test_names_of_fields_and_roles_are_part_of_the_manifest(tmp_path, capsys):
    messages = [{'role': 'human', 'content': 'q'}, {'role': 'bot', 'content': 'a'}]
    (tmp_path / 'x.jsonl').write_text('\n'.join([json.dumps({'dialog': messages, 'text': 'x'})] * 3))
    roles = ['--messages-field', 'dialog', '--roles', 'user=human,assistant=bot']
    assert prepare(tmp_path / 'x.jsonl', tmp_path / 'data', *roles) == EXIT_DONE
    assert load_manifest(tmp_path / 'data').made_from['roles'] == [['human', 'user'], ['bot', 'assistant']]
    capsys.readouterr()
    assert prepare(tmp_path / 'x.jsonl', tmp_path / 'data', *roles) == EXIT_DONE
    assert prepare(tmp_path / 'x.jsonl', tmp_path / 'data') == EXIT_BAD_INPUT
    assert 'messages_field dialog, not None' in capsys.readouterr().err
    assert prepare(tmp_path / 'x.jsonl', tmp_path / 'new', '--roles', 'user=human') == EXIT_BAD_INPUT
    assert '--roles=user=human is for conversations, but the input has none' in capsys.readouterr().err


def test_equal_conversations_are_deduplicated(tmp_path):
    write(tmp_path / 'x.jsonl', ['openai'], count=10)
    (tmp_path / 'x.jsonl').write_text((tmp_path / 'x.jsonl').read_text() * 2)
    assert prepare(tmp_path / 'x.jsonl', tmp_path / 'data', '--deduplicate', 'exact') == EXIT_DONE
    assert sum(split.documents for split in load_manifest(tmp_path / 'data').splits.values()) == 10


# Checksums from the last commit before conversations were supported.
GOLDEN = {
    'bytes': (
        '728e418067c3bbbdb43578a3545807ac806dfefca440bb063f1e47f0d0ce789e',
        {'train-00000.arrayrecord': '88738b68ebab6441', 'validation-00000.arrayrecord': 'ff777832dec687bf'},
    ),
    'bpe:300': (
        '19e65b9950f98e5a07891a17592603e0dc2894271ec5d0fb69d8e67a6434f499',
        {'train-00000.arrayrecord': '1e1b1aef754e54a0', 'validation-00000.arrayrecord': 'c6f28da1e768d25a'},
    ),
}


@pytest.mark.parametrize('spec', GOLDEN)
def test_preparation_of_texts_is_unchanged(tmp_path, spec):
    texts = write_texts(tmp_path / 'texts')
    assert prepare(texts, tmp_path / 'data', '--tokenizer', spec) == EXIT_DONE
    fingerprint, shards = GOLDEN[spec]
    dataset = load_manifest(tmp_path / 'data')
    assert dataset.fingerprint == fingerprint
    found = {name: hashlib.sha256(content).hexdigest()[:16] for name, content in contents(dataset.path).items()}
    assert {name: found[name] for name in shards} == shards
    assert set(found) == {*shards, 'dataset.json', 'tokenizer.json'}
    facts = json.loads((dataset.path / 'dataset.json').read_text())
    assert not {'masked', 'packed_window', 'chat_template_sha256', 'chat'} & facts.keys()
    assert not {'format', 'chat_template', 'pack_window'} & facts['made_from'].keys()
