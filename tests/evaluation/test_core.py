"""Tests the CORE metric against one forward pass per answer, with prompts written out separately."""

import dataclasses
import functools
import json
import math
import os
import random
from pathlib import Path

import jax
import numpy as np
import pytest

from maxlm.data.tokenizer.tokenizer import chars_tokenizer, train_bpe
from maxlm.errors import InputError
from maxlm.evaluation.statistics import difference, mean_of
from maxlm.evaluation.tasks import core
from maxlm.evaluation.tasks.core import evaluate_core
from maxlm.evaluation.tasks.core_bundle import open_bundle
from maxlm.inference.load import LoadedModel
from maxlm.inference.scoring import LogprobScorer
from tests.evaluation.core_bundles import TASKS, write_bundle
from tests.parameters import decoder_graph, logits, random_params
from tests.small import small_config, small_layout

TOKENIZER = chars_tokenizer(['abcdef \nx:'])
# Prompts with two solved examples are longer.
CONTEXT = 48
PREFIX = [TOKENIZER.end_of_document]


@functools.cache
def model():
    config = small_config(model__family='llama', model__dim=16, model__max_positions=CONTEXT)
    # With few ids, some answers are the most likely ones.
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=TOKENIZER.vocab_size))
    layout = small_layout(config)
    return LoadedModel(config, layout, random_params(config, layout, std=0.3), TOKENIZER, Path('tokenizer.json'), 1)


@functools.cache
def scorer():
    return LogprobScorer(model())


@functools.cache
def forward():
    """Returns a function that computes the logits of a token sequence, float64 [tokens, V]."""
    compute = jax.jit(functools.partial(logits, decoder_graph(model().config.model)))
    return lambda tokens: np.asarray(compute(model().params, np.array([tokens], np.int32))[0], np.float64)


@pytest.fixture(scope='module')
def bundle(tmp_path_factory):
    return write_bundle(tmp_path_factory.mktemp('core') / 'bundle')


def prompts(bundle, label):
    """Yields (line, gold, prompts, starts) of the examples of a task: character indices are token indices."""
    _, kind, (shots, *_), delimiter, _, _ = next(task for task in TASKS if task[0] == label)
    rows = list(enumerate(map(json.loads, (bundle / f'eval_data/part/{label}.jsonl').read_text().split('\n')), 1))
    random.Random(1337).shuffle(rows)

    def whole(row, answer):
        if kind == 'multiple_choice':
            return row['query'] + delimiter + row['choices'][answer]
        if kind == 'schema':
            return row['context_options'][answer] + delimiter + row['continuation']
        return row['context'].strip() + delimiter + row['continuation']

    for index, (line, row) in enumerate(rows):
        rest = [number for number in range(len(rows)) if number != index]
        shown = [rows[number][1] for number in random.Random(1234 + index).sample(rest, shots)]
        before = ''.join(whole(other, other.get('gold')) + '\n\n' for other in shown)
        answers = range(1 if kind == 'language_modeling' else 3)
        texts = [before + whole(row, answer) for answer in answers]
        if kind == 'language_modeling':
            starts = [len(texts[0]) - len(row['continuation'])]
        else:
            # The part that all texts have in common at the start, or at the end, is found letter by letter.
            sign = -1 if kind == 'schema' else 1
            length = 0
            while len({text[::sign][length : length + 1] for text in texts}) == 1:
                length += 1
            starts = [len(text) - length if sign < 0 else length for text in texts]
        yield line, row.get('gold', 0), texts, starts


def slow_record(line, gold, texts, starts):
    """Scores one example with one forward pass per answer."""
    losses, greedy = [], []
    for text, start in zip(texts, starts, strict=True):
        tokens = [*PREFIX, *TOKENIZER.encode_batch([text])[0].tolist()]
        # The first index after the prefix token. One choice may be the beginning of another.
        num = max(1, len(text) - start)
        tokens = tokens[-(CONTEXT + 1) :]
        logits_TV = forward()([*tokens[:-1], *[0] * (CONTEXT + 1 - len(tokens))])
        found = []
        for place in range(len(tokens) - num, len(tokens)):
            row = logits_TV[place - 1]
            found.append(math.log(np.exp(row - row.max()).sum()) + row.max() - row[tokens[place]])
            greedy.append(int(row.argmax()) == tokens[place])
        losses.append(sum(found) / len(found))
    correct = all(greedy) if len(texts) == 1 else losses.index(min(losses)) == gold
    return {'line': line, 'gold': gold, 'correct': correct, 'losses': pytest.approx(losses, abs=1e-4)}


def run(tasks):
    return evaluate_core(tasks, scorer(), TOKENIZER, PREFIX)


def test_scores_equal_separate_forward_passes(bundle, monkeypatch):
    tasks = open_bundle(str(bundle))
    results = run(tasks)
    values = {measure.name: measure.value for measure in results.measures}
    errors = {measure.name: measure.error for measure in results.measures}
    centered = []
    for label, _, _, _, percent, num in TASKS:
        slow = [slow_record(*example) for example in prompts(bundle, label)]
        assert len(slow) == num
        assert results.records[f'core_{label}'] == slow
        accuracy = sum(record['correct'] for record in slow) / num
        # The scores are informative: neither all right nor all wrong.
        assert 0 < accuracy < 1
        assert values[f'core/{label}/acc'] == pytest.approx(accuracy)
        centered.append((accuracy - percent / 100) / (1 - percent / 100))
        assert values[f'core/{label}/centered'] == pytest.approx(centered[-1])
        error = math.sqrt(accuracy * (1 - accuracy) / (num - 1)) / (1 - percent / 100)
        assert errors[f'core/{label}/centered'] == pytest.approx(error)
    assert values['core'] == pytest.approx(sum(centered) / len(TASKS))
    assert len(values) == 1 + 2 * len(TASKS)
    # Control: other few-shot examples change the scores of the tasks that have them.
    monkeypatch.setattr(core, 'FEWSHOT_SEED', 1)
    changed = run(tasks).records
    assert [name for name in changed if changed[name] != results.records[name]] == ['core_choice', 'core_words']


def test_prompts_are_longer_than_the_context(bundle):
    lengths = [len(text) for *_, texts, _ in prompts(bundle, 'choice') for text in texts]
    assert min(lengths) < CONTEXT < max(lengths)


def test_errors_are_those_of_examples():
    # The tasks of a bundle are not a sample: their means, which differ by 0.8, are not an error.
    tasks = [mean_of(name, np.arange(100) < num) for name, num in (('a', 10), ('b', 90))]
    total = core._core(tasks)
    assert total.value == pytest.approx(0.5)
    assert total.error == pytest.approx(math.hypot(*(task.error for task in tasks)) / 2, rel=0.01)
    # Two models that differ in one example of a task.
    other = core._core([mean_of('a', np.arange(100) < 11), tasks[1]])
    change = difference(total, other)
    assert change.value == pytest.approx(0.005)
    assert change.error == pytest.approx(mean_of('', np.arange(100) < 1).error / 2, rel=0.01)


def test_the_limit_selects_few_shot_examples_too(bundle):
    choice, _, words = open_bundle(str(bundle), limit=2)
    assert [len(choice.examples), len(words.examples)] == [2, 2]
    # With fewer examples than required, a prompt has all others.
    (context, _), *_ = core._requests(choice, 0, TOKENIZER, PREFIX)
    assert TOKENIZER.decode(context[1:]).count('x: ') == 2


def test_answers_are_split_by_tokens(tmp_path):
    tokenizer = train_bpe(['bad cab bead cafe x: bad cab'] * 20, 290)
    folder = write_bundle(tmp_path / 'bundle')
    (folder / 'eval_data/part/choice.jsonl').write_text(
        json.dumps({'query': 'bad', 'choices': ['cab cafe', 'cab bead', 'cab'], 'gold': 0})
    )
    (folder / 'eval_data/part/schema.jsonl').write_text(
        json.dumps({'context_options': ['bad cab', 'bead cab'], 'continuation': 'cafe', 'gold': 0})
    )
    (folder / 'eval_data/part/words.jsonl').write_text(json.dumps({'context': ' bad \n', 'continuation': 'cab cafe'}))
    tasks = [task._replace(delimiter=task.delimiter or ' ') for task in open_bundle(str(folder))]
    choice, schema, words = (
        [[tokenizer.decode(part) for part in request] for request in core._requests(task, 0, tokenizer, [256])]
        for task in tasks
    )
    start = tokenizer.decode([256])
    # The common start of the choices belongs to the context. The third choice keeps its last token.
    assert choice == [
        [f'{start}bad\nx: cab', ' cafe'],
        [f'{start}bad\nx: cab', ' bead'],
        [f'{start}bad\nx:', ' cab'],
    ]
    # The common end of the contexts is scored too.
    assert schema == [[f'{start}bad', ' cab cafe'], [f'{start}bead', ' cab cafe']]
    # The space after the context is in the first token of the continuation, or a scored token itself.
    assert words == [[f'{start}bad', ' cab cafe']]
    ((context, continuation),) = core._requests(tasks[2], 0, TOKENIZER, PREFIX)
    assert (TOKENIZER.decode(context[1:]), TOKENIZER.decode(continuation)) == ('bad', ' cab cafe')


def replace(file, old, new):
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ('file', 'old', 'new', 'message'),
    [
        (
            'core.yaml',
            '"multiple_choice"',
            '"other"',
            r"task 1 \(choice\) has the unknown icl_task_type 'other'; use mult",
        ),
        ('core.yaml', '"label"', '"name"', 'core.yaml: task 1 has no label; add it'),
        ('core.yaml', '"label": "schema"', '"label": "choice"', 'there are two tasks choice; rename one'),
        ('core.yaml', 'icl_tasks', 'tasks', 'icl_tasks is not a list of tasks'),
        ('core.yaml', '{', '{{{', 'core.yaml: invalid YAML'),
        ('core.yaml', '[2, 5]', '"x"', "has num_fewshot='x'; set a number"),
        ('core.yaml', 'part/choice', 'part/none', r'part/none\.jsonl: No such file'),
        ('eval_meta_data.csv', 'choice', 'chance', r'task 1 \(choice\) has no row in eval_meta_data\.csv; add it'),
        ('eval_meta_data.csv', '33.3', '100', 'has a random baseline of 100; it must be at least 0 and below'),
        (
            'eval_meta_data.csv',
            '33.3',
            'third',
            r'eval_meta_data\.csv: ValueError: could not convert .*; give a CSV file',
        ),
        (
            'eval_meta_data.csv',
            'Eval Task',
            'Task',
            r"eval_meta_data\.csv: KeyError: 'Eval Task'; give a CSV file with the columns Eval Task",
        ),
        ('eval_data/part/choice.jsonl', '\n{', '\n[', r'choice\.jsonl \(multiple_choice\): line 2 is not valid JSON'),
        (
            'eval_data/part/choice.jsonl',
            '\n{',
            '\n3\n{',
            r'choice\.jsonl \(multiple_choice\): line 2 is not an object',
        ),
        ('eval_data/part/choice.jsonl', '"query"', '"question"', 'line 1 has no query; add it'),
        (
            'eval_data/part/choice.jsonl',
            '"choices": [',
            '"choices": [3, ',
            'line 1 has choices=.*; it must be a list of texts',
        ),
        ('eval_data/part/choice.jsonl', '"query": "', '"query": 3, "x": "', 'line 1 has query=3; it must be a text'),
        ('eval_data/part/choice.jsonl', '"gold": ', '"gold": 7', r'line 1 has gold=7\d; it must be the index'),
        ('eval_data/part/words.jsonl', '"continuation": "', '"continuation": " ", "x": "', 'has an empty continuation'),
    ],
)
def test_bad_bundles_are_named(tmp_path, file, old, new, message):
    folder = write_bundle(tmp_path / 'bundle')
    replace(folder / file, old, new)
    with pytest.raises(InputError, match=message) as found:
        open_bundle(str(folder))
    assert '\n' not in str(found.value)


# A list of 10 ** 9 references to one text, whose representation does not fit in memory.
ALIASES = 'a: &a [x]\n' + ''.join(
    f'{i}: &{i} [{",".join(["*" + (str(i - 1) if i else "a")] * 10)}]\n' for i in range(9)
)
LINE = '{"query": "q", "choices": ["a", "b"], "gold": %s}'


@pytest.mark.parametrize(
    ('file', 'content', 'message'),
    [
        ('core.yaml', f'{ALIASES}icl_tasks:\n- label: *8', 'task 1 has label=a list; it must be a text'),
        ('core.yaml', 'icl_tasks: ' + '[' * 5000, 'core.yaml: invalid YAML: maximum recursion'),
        ('core.yaml', 'icl_tasks:\n- {label: 2001-99-99}', 'core.yaml: invalid YAML: month must be in'),
        ('core.yaml', f'icl_tasks:\n- {{label: {"9" * 10_000}}}', 'core.yaml: invalid YAML: Exceeds the limit'),
        ('core.yaml', 'icl_tasks:\n' + '- {label: x}\n' * 100_000, 'core.yaml: has 1,300,011 bytes, more than'),
        ('core.yaml', {'label': '../../x'}, r"has the label '\.\./\.\./x'; use at most 100 letters"),
        ('core.yaml', {'label': 'a\nb'}, r"has the label 'a\\nb'; use at most 100 letters"),
        ('core.yaml', {'label': 'a' * 101}, "has the label 'aaa"),
        ('core.yaml', {'icl_task_type': 'a\n' * 5000}, 'has the unknown icl_task_type'),
        ('core.yaml', {'num_fewshot': True}, 'has num_fewshot=True; set a number'),
        ('core.yaml', {'num_fewshot': [[1] * 10_000]}, 'has num_fewshot=a list; set a number'),
        ('core.yaml', {'dataset_uri': '../../core.yaml'}, r'has dataset_uri=.*; give a path below eval_data'),
        ('core.yaml', {'dataset_uri': '/etc/hostname'}, r'has dataset_uri=.*; give a path below eval_data'),
        ('core.yaml', {'dataset_uri': 'x\ny'}, r'has dataset_uri=.*; give a path below eval_data'),
        ('core.yaml', {'dataset_uri': 'x' * 5000}, r'has dataset_uri=.*; give a path below eval_data'),
        ('eval_data/part/choice.jsonl', LINE % '[[[1]]]', 'line 1 has gold=a list; it must be the index'),
        ('eval_data/part/choice.jsonl', LINE % f'"{"x" * 5000}"', 'line 1 has gold=.*; it must be the index'),
    ],
)
def test_hostile_bundles_are_one_line_errors(tmp_path, file, content, message):
    folder = write_bundle(tmp_path / 'bundle')
    if isinstance(content, dict):
        first = json.loads((folder / file).read_text())['icl_tasks'][0]
        content = json.dumps({'icl_tasks': [{**first, **content}]})
    (folder / file).write_text(content)
    with pytest.raises(InputError, match=message) as found:
        open_bundle(str(folder))
    assert '\n' not in str(found.value)
    assert len(str(found.value)) < 1000


def test_a_large_sparse_file_is_an_error(tmp_path):
    folder = write_bundle(tmp_path / 'bundle')
    os.truncate(folder / 'eval_data/part/choice.jsonl', 2**40)
    with pytest.raises(InputError, match='has 1,099,511,627,776 bytes, more than the limit'):
        open_bundle(str(folder))


def test_other_bad_paths_and_answers(tmp_path, bundle):
    with pytest.raises(InputError, match=r'eval_meta_data\.csv: No such file .*; give the directory of an evaluation'):
        open_bundle(str(tmp_path))
    tasks = [task for task in open_bundle(str(bundle)) if task.label == 'words']
    example = tasks[0].examples[0]
    long = [example._replace(candidates=[('bad', 'a' * (CONTEXT + 1))]), example]
    with pytest.raises(InputError, match=rf'core/words: line {example.line} has an answer of {CONTEXT + 1} tokens'):
        run([tasks[0]._replace(examples=long)])
