"""Writes small evaluation bundles of the CORE metric, with tasks of all types."""

import json

import numpy as np

WORDS = ('bad', 'cab', 'dab', 'fade', 'bead', 'face', 'deaf', 'cafe')


def sentence(rng, num):
    return ' '.join(rng.choice(WORDS, num))


def rows_of(kind, num, seed=0):
    """Returns examples of one type, whose contexts have 1 to 4 words."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(num):
        length, gold = int(rng.integers(1, 5)), int(rng.integers(0, 3))
        if kind == 'multiple_choice':
            row = {'query': sentence(rng, length), 'choices': [sentence(rng, 1) for _ in range(3)], 'gold': gold}
        elif kind == 'schema':
            contexts = [sentence(rng, length) for _ in range(3)]
            row = {'context_options': contexts, 'continuation': sentence(rng, 1), 'gold': gold}
        else:
            # The context ends with a space, which prompts do not contain.
            row = {'context': f'{sentence(rng, length)} ', 'continuation': str(rng.choice(list('abcdef')))}
        rows.append(row)
    return rows


# (label, type, few-shot examples, delimiter, random baseline in percent, examples)
TASKS = (
    ('choice', 'multiple_choice', [2, 5], '\nx: ', 33.3, 30),
    ('schema', 'schema', [0], ' ', 50, 20),
    ('words', 'language_modeling', [1], '', 0, 60),
)


def write_bundle(folder, tasks=TASKS):
    """Writes a bundle and returns its directory."""
    (folder / 'eval_data/part').mkdir(parents=True)
    entries = []
    for label, kind, num_fewshot, delimiter, _, num in tasks:
        lines = [json.dumps(row) for row in rows_of(kind, num)]
        (folder / f'eval_data/part/{label}.jsonl').write_text('\n'.join(lines))
        entry = {'label': label, 'dataset_uri': f'part/{label}.jsonl', 'num_fewshot': num_fewshot}
        entry |= {'icl_task_type': kind} | ({} if delimiter == ' ' else {'continuation_delimiter': delimiter})
        entries.append(entry)
    # JSON is a subset of YAML.
    (folder / 'core.yaml').write_text(json.dumps({'icl_tasks': entries}))
    rows = [f'{label},"x, y",{baseline}' for label, _, _, _, baseline, _ in tasks]
    (folder / 'eval_meta_data.csv').write_text('\n'.join(['Eval Task,Task Category,Random baseline', *rows]))
    return folder
