"""Tests preferences from files to batches."""

import dataclasses
import json
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.config.loading import build, default
from maxlm.config.schema import DataConfig
from maxlm.config.sections.posttraining import DpoConfig
from maxlm.data.chat.template import CHATML
from maxlm.data.chat.token_flags import is_document_start
from maxlm.data.dataset.records import load_manifest, verify
from maxlm.data.dataset.token_reader import TokenReader
from maxlm.data.loader.dataset import check_objective, open_training_data
from maxlm.data.prepare import partitions, write_shards
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, InputError
from maxlm.training.losses.dpo import preference_terms
from tests.data.chat.test_template import PLAIN_CHATML
from tests.preparing import contents, run

WINDOW = 1024
WORDS = ['red', 'green', 'blue', '<|im_end|>', '<|im_start|>assistant', '🙂', 'größe']
KINDS = ['texts', 'messages', 'conversations', 'ultrafeedback', 'dialogues']


def record(rng, kind, number, longest=12):
    """Returns a record of the given kind, and its unique texts (prompt, chosen, rejected)."""
    prompt, chosen, rejected = (
        f'{what}{number} ' + ' '.join(rng.choices(WORDS, k=rng.randrange(1, longest))) for what in 'QCR'
    )
    user = {'role': 'user', 'content': prompt}
    answers = [{'role': 'assistant', 'content': answer} for answer in (chosen, rejected)]
    before = [{'role': 'user', 'content': 'First'}, {'role': 'assistant', 'content': 'Second'}]
    texts = (prompt, chosen, rejected)
    if kind == 'texts':
        return dict(zip(('prompt', 'chosen', 'rejected'), texts, strict=True)), texts
    if kind == 'messages':
        return {'prompt': [*before, user], 'chosen': answers[:1], 'rejected': answers[1]}, texts
    if kind == 'conversations':
        return {'chosen': [*before, user, answers[0]], 'rejected': [*before, user, answers[1]]}, texts
    if kind == 'ultrafeedback':
        conversations = [[user, answer] for answer in answers]
        return {
            'prompt': prompt,
            'chosen': conversations[0],
            'rejected': conversations[1],
            'messages': conversations[0],
            'score': 7.5,
        }, texts
    begin = f'\n\nHuman: {prompt}\n\nAssistant: '
    return {'chosen': begin + chosen, 'rejected': begin + rejected}, texts


def write(path, kinds, count=30, seed=4, longest=12):
    """Writes a file with records of alternating kinds, and returns the texts of each."""
    rng = random.Random(seed)
    made = [record(rng, kinds[i % len(kinds)], i, longest) for i in range(count)]
    path.write_text(''.join(json.dumps(entry, ensure_ascii=False) + '\n' for entry, _ in made))
    return [texts for _, texts in made]


def prepare(source, output, *options):
    arguments = ['--input', source, '--output', output, '--workers', 1, '--quiet', '--validation-fraction', 0.2]
    return run(*arguments, '--tokenizer', 'bytes', '--pack-seq-len', WINDOW, *options)


def pairs_in(corpus, batches, num):
    """Returns (prompt, chosen, rejected) of each pair, from the segments and weights of the batches."""
    tokenizer = Tokenizer.load(corpus.first.tokenizer_path)
    pairs = []
    for step in range(num):
        batch = batches[step]
        for tokens, targets, weights, segments in zip(
            *(batch[name] for name in ('tokens', 'targets', 'weights', 'segments')), strict=True
        ):
            documents = []
            for segment in range(1, segments.max(initial=0) + 1):
                is_target = (segments == segment) & (weights > 0)
                if not is_target.any():
                    # This segment contains only padding, which is at the end.
                    assert segment == segments.max()
                    assert segment % 2 == 1
                    continue
                (places,) = is_target.nonzero()
                # The targets are one answer without gaps.
                assert np.diff(places).tolist() == [1] * (len(places) - 1)
                prompt = tokens[(segments == segment) & (np.arange(len(tokens)) <= places[0])]
                documents.append((prompt.tolist(), tokenizer.decode(targets[places])))
            assert len(documents) % 2 == 0
            for (prompt, chosen), (same, rejected) in zip(documents[::2], documents[1::2], strict=True):
                assert prompt == same
                pairs.append((tokenizer.decode(prompt), chosen, rejected))
    return pairs


def all_pairs(path, **data):
    corpus = open_training_data(DataConfig(path=str(path), seq_len=WINDOW, **data))
    validation = corpus.validation_batches(2)
    training = pairs_in(corpus, corpus.train_batches(1), corpus.training_windows)
    return training, pairs_in(corpus, validation, len(validation))


def assert_pairs(pairs, texts):
    """Checks that the pairs are exactly those of the texts."""
    assert len(pairs) == len(texts)
    by_prompt = {prompt: pair for prompt, *pair in pairs}
    assert len(by_prompt) == len(texts)
    for prompt, chosen, rejected in texts:
        (place,) = [text for text in by_prompt if f'{prompt}<|im_end|>\n<|im_start|>assistant\n' in text]
        assert place.endswith(f'<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n')
        assert by_prompt[place] == [f'{chosen}<|im_end|>', f'{rejected}<|im_end|>']


@pytest.mark.parametrize(
    ('kinds', 'tokenizer', 'template'),
    [
        *(([kind], 'bytes', CHATML) for kind in KINDS),
        (KINDS, 'bpe:300', CHATML),
        # This template has no {% generation %}.
        (KINDS, 'bpe:300', PLAIN_CHATML),
    ],
)
def test_pairs_stay_together(tmp_path, kinds, tokenizer, template):
    texts = write(tmp_path / 'x.jsonl', kinds)
    (tmp_path / 'template.jinja').write_text(template)
    options = ['--tokenizer', tokenizer, '--chat-template', tmp_path / 'template.jinja']
    assert prepare(tmp_path / 'x.jsonl', tmp_path / 'data', *options) == EXIT_DONE
    dataset = load_manifest(tmp_path / 'data')
    verify(dataset)
    assert (dataset.preferences, dataset.masked, dataset.packed_window) == (True, True, WINDOW)
    training, validation = all_pairs(tmp_path / 'data')
    assert min(len(training), len(validation)) > 0
    assert_pairs(training + validation, texts)
    assert [split.documents for split in dataset.splits.values()] == [len(training), len(validation)]
    left = [(dataset.chat[name]['left_out'], dataset.chat[name]['undecided']) for name in dataset.splits]
    assert left == [(0, 0)] * 2
    # Each window of a shard starts with a pair.
    (shard,) = dataset.splits['train'].shards
    windows = TokenReader(dataset, [shard]).read(0, 0, shard.tokens).reshape(-1, WINDOW)
    assert is_document_start(windows)[:, 0].all()
    # Control: swapped chosen and rejected answers fail.
    swapped = [(prompt, rejected, chosen) for prompt, chosen, rejected in texts]
    with pytest.raises(AssertionError):
        assert_pairs(training + validation, swapped)


def test_the_loss_detects_the_pairs(tmp_path):
    texts = write(tmp_path / 'x.jsonl', KINDS)
    assert prepare(tmp_path / 'x.jsonl', tmp_path / 'data', '--validation-fraction', 0) == EXIT_DONE
    corpus = open_training_data(DataConfig(path=str(tmp_path / 'data'), seq_len=WINDOW))
    batches = corpus.train_batches(1)
    find_terms = jax.jit(preference_terms, static_argnums=4)
    pairs = chosen = rejected = 0
    for step in range(corpus.training_windows):
        batch = batches[step]
        # Each byte has a log-probability of 1 under the policy and of 0 under the reference.
        ones = jnp.ones(batch['weights'].shape)
        dpo = DpoConfig(beta=1.0)
        terms = find_terms(ones, 0 * ones, jnp.asarray(batch['weights']), jnp.asarray(batch['segments']), dpo)
        pairs, chosen = pairs + int(terms.pairs), chosen + int(terms.chosen_reward)
        rejected += int(terms.rejected_reward)
    # The end of the turn counts as one byte of an answer.
    lengths = [sum(len(entry[place].encode()) + 1 for entry in texts) for place in (1, 2)]
    assert (pairs, chosen, rejected) == (len(texts), *lengths)
    assert chosen != rejected


def test_special_token_strings_in_data_are_encoded_as_text(tmp_path):
    nasty = 'a<|im_end|>\n<|im_start|>assistant\n<|endoftext|>'
    entry = {'prompt': nasty, 'chosen': f'{nasty}b', 'rejected': f'{nasty}c'}
    (tmp_path / 'x.jsonl').write_text(json.dumps(entry))
    assert prepare(tmp_path / 'x.jsonl', tmp_path / 'data', '--validation-fraction', 0) == EXIT_DONE
    dataset = load_manifest(tmp_path / 'data')
    tokenizer = Tokenizer.load(dataset.tokenizer_path)
    corpus = open_training_data(DataConfig(path=str(tmp_path / 'data'), seq_len=WINDOW))
    batch = corpus.train_batches(1)[0]
    for segment, answer in ((1, 'b'), (2, 'c')):
        ids = batch['tokens'][batch['segments'] == segment].tolist()
        special = [tokenizer.special_tokens[i].content for i in ids if i in tokenizer.special_tokens]
        assert special == ['<|im_start|>', '<|im_end|>'] * 2 + ['<|endoftext|>']
        target_ids = batch['targets'][(batch['segments'] == segment) & (batch['weights'] > 0)]
        assert tokenizer.decode(target_ids) == f'{nasty}{answer}<|im_end|>'


def test_unusable_pairs_are_skipped_and_reported(tmp_path, capsys):
    lines = [
        {'prompt': 'p', 'chosen': 'good', 'rejected': 'bad'},
        {'prompt': 'p', 'chosen': 'same', 'rejected': 'same'},
        {'prompt': 'p', 'chosen': 'trimmed', 'rejected': ' trimmed\n'},
        {'prompt': 'p', 'chosen': 'good', 'rejected': ' '},
        {'prompt': 'p', 'chosen': 'long' * WINDOW, 'rejected': 'bad'},
        {'prompt': 'p', 'chosen': 'c' * 100, 'rejected': 'r' * 100},
    ]
    path = tmp_path / 'x.jsonl'
    path.write_text('\n'.join(map(json.dumps, lines)))
    arguments = ['--input', path, '--tokenizer', 'bytes', '--workers', 1, '--validation-fraction', 0]
    arguments += ['--chat-template', 'llama3', '--pack-seq-len', WINDOW, '--output']
    assert run(*arguments, tmp_path / 'data') == EXIT_DONE
    counts = load_manifest(tmp_path / 'data').chat['train']
    assert (counts['left_out'], counts['undecided'], counts['shortened']) == (1, 3, 0)
    out = capsys.readouterr().out
    assert 'train: 2 pairs' in out
    assert '1 pairs are skipped because they are longer than a sequence' in out
    assert '3 pairs are skipped because their answers are equal or one is empty' in out
    # The second command reads the counts from the manifest.
    assert run(*arguments, tmp_path / 'data') == EXIT_DONE
    assert '3 pairs are skipped because their answers are equal' in capsys.readouterr().out
    path.write_text('\n'.join(map(json.dumps, lines[1:5])))
    assert run(*arguments, tmp_path / 'none') == EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert f'1 are longer than --pack-seq-len={WINDOW} and 3 have equal or empty answers' in error


def test_the_longest_pair_that_fits(tmp_path):
    def tokens(length):
        (tmp_path / 'x.jsonl').write_text(json.dumps({'prompt': 'p', 'chosen': 'c' * length, 'rejected': 'r'}))
        code = prepare(tmp_path / 'x.jsonl', tmp_path / str(length), '--validation-fraction', 0)
        return load_manifest(tmp_path / str(length)).chat['train'] if code == EXIT_DONE else None

    longest = tokens(10)['padding'] + 10
    assert tokens(longest)['padding'] == 0
    assert tokens(longest + 1) is None
    corpus = open_training_data(DataConfig(path=str(tmp_path / str(longest)), seq_len=WINDOW))
    (pair,) = pairs_in(corpus, corpus.train_batches(1), 1)
    assert pair[1:] == ('c' * longest + '<|im_end|>', 'r<|im_end|>')


@pytest.mark.multiprocess
def test_any_number_of_workers_and_a_restart_give_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(partitions, 'MIN_GROUP_BYTES', 2000)
    texts = write(tmp_path / 'x.jsonl', KINDS, count=60)
    for workers in (1, 2):
        assert prepare(tmp_path / 'x.jsonl', tmp_path / str(workers), '--workers', workers) == EXIT_DONE
    single_worker = contents(tmp_path / '1')
    assert len([name for name in single_worker if name.startswith('train-')]) >= 4
    assert single_worker == contents(tmp_path / '2')
    assert_pairs([pair for part in all_pairs(tmp_path / '1') for pair in part], texts)

    original, runs = write_shards.WriteShards.run, []

    def fail_once(self, report):
        runs.append(self.partition.number)
        if len(runs) == 3:
            raise KeyboardInterrupt
        original(self, report)

    monkeypatch.setattr(write_shards.WriteShards, 'run', fail_once)
    prepare(tmp_path / 'x.jsonl', tmp_path / 'again')
    assert not (tmp_path / 'again' / 'dataset.json').exists()
    assert prepare(tmp_path / 'x.jsonl', tmp_path / 'again') == EXIT_DONE
    # Finished partitions are not written again.
    assert runs[:4] == [0, 1, 2, 2]
    assert contents(tmp_path / 'again') == single_worker


def test_incompatible_options_are_rejected(tmp_path, capsys):
    write(tmp_path / 'x.jsonl', ['texts'], count=3)
    (tmp_path / 'chat.jsonl').write_text(json.dumps({'instruction': 'i', 'output': 'o'}))
    (tmp_path / 'plain.txt').write_text('plain')
    mixed = tmp_path / 'mixed.jsonl'
    mixed.write_text((tmp_path / 'x.jsonl').read_text() + (tmp_path / 'chat.jsonl').read_text())
    for source, options, words in [
        ('x.jsonl', ['--pack-seq-len', 0], ['--pack-seq-len=0', 'data.seq_len']),
        ('x.jsonl', ['--filter', 'c4'], ['--filter=c4', 'preferences']),
        ('x.jsonl', ['--fim-rate', 0.5], ['--fim-rate=0.5', 'preferences']),
        ('x.jsonl', ['--format', 'text', '--pack-seq-len', 0], ['use --format=preference']),
        ('plain.txt', ['--format', 'preference'], ['--format=preference', 'plain.txt is not JSONL']),
        ('chat.jsonl', ['--format', 'preference'], ['chat.jsonl:1: no preference', '"chosen" and "rejected"']),
        ('mixed.jsonl', [], ['mixed.jsonl:4: no preference']),
    ]:
        assert prepare(tmp_path / source, tmp_path / 'data', *options) == EXIT_BAD_INPUT
        error = capsys.readouterr().err
        assert all(word in error for word in words), error
        assert error.count('\n') == 1
    for other in ('chat.jsonl', 'plain.txt'):
        assert prepare(tmp_path / other, tmp_path / 'data', '--input', tmp_path / 'x.jsonl', tmp_path / other) == 2
        error = capsys.readouterr().err
        assert 'x.jsonl contains preferences' in error
        assert f'{other} does not' in error
    assert not list((tmp_path / 'data').glob('*.arrayrecord'))
    assert prepare(mixed, tmp_path / 'data', '--skip-bad-records') == EXIT_DONE
    dataset = load_manifest(tmp_path / 'data')
    assert [entry['name'] for entry in dataset.left_out] == ['mixed.jsonl:4']
    assert dataset.made_from['format'] == 'preference'


def write_labels(path, count=30, seed=4):
    """Writes answers with alternating labels as texts and messages; returns (prompt, answer, label) of each."""
    rng, lines, texts = random.Random(seed), [], []
    for number in range(count):
        _, (prompt, chosen, rejected) = record(rng, 'texts', number)
        label = number % 3 == 0
        answer = chosen if label else rejected
        texts.append((prompt, answer, label))
        given = {'prompt': prompt, 'completion': answer}
        if number % 2:
            given['prompt'] = [{'role': 'user', 'content': prompt}]
            given['completion'] = [{'role': 'assistant', 'content': answer}]
        lines.append(json.dumps({**given, 'label': label}))
    path.write_text('\n'.join(lines))
    return texts


def labels_in(corpus, batches, num):
    """Returns (prompt, answer, label) of each answer of the batches; the number of the segment gives the label."""
    tokenizer = Tokenizer.load(corpus.first.tokenizer_path)
    found = []
    for step in range(num):
        batch = batches[step]
        tokens, targets, weights, segments = (batch[name] for name in ('tokens', 'targets', 'weights', 'segments'))
        for row, segment in sorted({(row, segments[row, place]) for row, place in np.argwhere(weights > 0)}):
            places = np.flatnonzero((segments[row] == segment) & (weights[row] > 0))
            before = (segments[row] == segment) & (np.arange(tokens.shape[1]) <= places[0])
            answer = tokenizer.decode(targets[row, places])
            found.append((tokenizer.decode(tokens[row, before]), answer, segment % 2 == 1))
    return found


def test_labels_are_preserved(tmp_path, capsys):
    texts = write_labels(tmp_path / 'x.jsonl')
    arguments = ['--input', tmp_path / 'x.jsonl', '--tokenizer', 'bytes', '--pack-seq-len', WINDOW, '--workers', 1]
    assert run(*arguments, '--validation-fraction', 0.2, '--output', tmp_path / 'data') == EXIT_DONE
    dataset = load_manifest(tmp_path / 'data')
    verify(dataset)
    assert dataset.preferences
    assert [dataset.chat[name]['labeled'] for name in dataset.splits] == [s.documents for s in dataset.splits.values()]
    assert sum(split.documents for split in dataset.splits.values()) == len(texts)
    assert 'answers with labels' in capsys.readouterr().out
    corpus = open_training_data(DataConfig(path=str(tmp_path / 'data'), seq_len=WINDOW))
    validation = corpus.validation_batches(2)
    found = labels_in(corpus, corpus.train_batches(1), corpus.training_windows)
    found += labels_in(corpus, validation, len(validation))
    template = '<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n'
    wanted = [(template.format(prompt), f'{answer}<|im_end|>', label) for prompt, answer, label in texts]
    assert sorted(found) == sorted(wanted)


def test_losses_of_pairs_reject_labels(tmp_path, prepared):
    write_labels(tmp_path / 'x.jsonl')
    assert prepare(tmp_path / 'x.jsonl', tmp_path / 'labels') == EXIT_DONE
    labels, pairs = load_manifest(tmp_path / 'labels'), load_manifest(prepared / 'pairs')
    with pytest.raises(InputError, match=r'dpo.loss_type=sigmoid: .*labels contains single answers.*loss_type=kto'):
        check_objective(config_of('dpo', labels.path), labels)
    with pytest.raises(InputError, match=r'train.objective=reward: .*labels contains single answers'):
        check_objective(config_of('reward', labels.path), labels)
    check_objective(config_of('reward', pairs.path), pairs)
    config = config_of('dpo', labels.path)
    kto = dataclasses.replace(config, dpo=dataclasses.replace(config.dpo, loss_type='kto'))
    for dataset in (labels, pairs):
        check_objective(kto, dataset)


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
    """Prepares one file as preferences and as conversations; returns the directory of both data sets."""
    path = tmp_path_factory.mktemp('prepared')
    write(path / 'x.jsonl', ['ultrafeedback'])
    assert prepare(path / 'x.jsonl', path / 'pairs') == EXIT_DONE
    assert prepare(path / 'x.jsonl', path / 'chats', '--format', 'chat') == EXIT_DONE
    return path


def config_of(objective, path):
    values = default()
    values.train.objective, values.data.path, values.data.seq_len = objective, str(path), WINDOW
    values.train.num_steps, values.train.global_batch_size, values.train.init_from = 1, 1, 'start'
    values.model.num_layers, values.model.dim, values.model.num_heads = 1, 8, 1
    return build(values)


def test_objectives_need_their_data(prepared):
    pairs, chats = (load_manifest(prepared / name) for name in ('pairs', 'chats'))
    check_objective(config_of('dpo', pairs.path), pairs)
    check_objective(config_of('next_token', chats.path), chats)
    with pytest.raises(InputError, match=r'objective=dpo: .*chats contains no preferences.*--pack-seq-len=1024'):
        check_objective(config_of('dpo', chats.path), chats)
    for objective in ('next_token', 'grpo'):
        with pytest.raises(InputError, match=rf'objective={objective}: .*pairs contains preferences'):
            check_objective(config_of(objective, pairs.path), pairs)


def test_mixtures_contain_only_preferences_or_none(prepared, tmp_path):
    write(tmp_path / 'y.jsonl', ['texts'], seed=9)
    tokenizer = ['--tokenizer', prepared / 'pairs' / 'tokenizer.json']
    assert prepare(tmp_path / 'y.jsonl', tmp_path / 'more', *tokenizer) == EXIT_DONE

    def open_mixture(*paths):
        return open_training_data(DataConfig(sources=tuple((str(path), 1.0) for path in paths), seq_len=WINDOW))

    corpus = open_mixture(prepared / 'pairs', tmp_path / 'more')
    assert pairs_in(corpus, corpus.train_batches(4), 6)
    for names in (('pairs', 'chats'), ('chats', 'pairs')):
        with pytest.raises(InputError, match=r'data\.sources: .*pairs contains preferences, and .*chats does not'):
            open_mixture(*(prepared / name for name in names))


def test_other_sequence_lengths_are_rejected(prepared):
    data = DataConfig(path=str(prepared / 'pairs'), seq_len=WINDOW)
    for changed in ({'seq_len': 512}, {'seq_len': 2048}, {'seq_len_schedule': ((512, 0.5),)}):
        with pytest.raises(InputError, match='sequences of 1024 tokens'):
            open_training_data(dataclasses.replace(data, **changed))


def test_older_manifests_load(prepared):
    """Checks that manifests without the key `preferences` load, as those of conversations and texts."""
    manifest = prepared / 'chats' / 'dataset.json'
    assert 'preferences' not in json.loads(manifest.read_text())
    assert not load_manifest(prepared / 'chats').preferences
    facts = json.loads((prepared / 'pairs' / 'dataset.json').read_text())
    assert facts['preferences'] is True
    for change in ({'preferences': 1}, {'packed_window': 0}):
        broken = prepared / 'broken'
        broken.mkdir(exist_ok=True)
        (broken / 'dataset.json').write_text(json.dumps({**facts, **change}))
        with pytest.raises(InputError, match='is malformed'):
            load_manifest(broken, complete=False)
