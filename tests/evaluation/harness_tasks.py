"""Provides task files of every kind that lm-eval supports, over generated documents."""

import json

import numpy as np

WORDS = ('amber', 'birch', 'cedar', 'delta', 'ember', 'fjord', 'grove', 'heath', 'inlet', 'jetty')
CHOICE = """
task: local_choice
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: acc_norm
    aggregation: mean
    higher_is_better: true
"""
LETTERS = """
task: local_letters
output_type: multiple_choice
doc_to_text: "{{question}} Answer:"
doc_to_choice: ["A", "B", "C", "D"]
doc_to_target: answer
num_fewshot: 2
fewshot_split: test
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
LAST_WORD = """
task: local_last_word
output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: " {{choices[0]}}"
metric_list:
  - metric: perplexity
    aggregation: perplexity
    higher_is_better: false
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
ROLLING = """
task: local_rolling
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
  - metric: bits_per_byte
"""
GENERATE = """
task: local_generate
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{written}}"
generation_kwargs:
  until: ["\\n", "z"]
  max_gen_toks: 12
  do_sample: false
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""
KINDS = {'choice': CHOICE, 'letters': LETTERS, 'last_word': LAST_WORD, 'rolling': ROLLING, 'generate': GENERATE}


def documents(num=12, seed=0):
    """Returns questions of different lengths. Some are too long for a small context."""
    rng = np.random.default_rng(seed)

    def text(num_words):
        return ' '.join(rng.choice(WORDS, num_words))

    return [
        {
            'question': text(int(rng.integers(1, 24))),
            'choices': [text(int(rng.integers(1, 4))) for _ in range(4)],
            'answer': int(rng.integers(0, 4)),
            'text': text(int(rng.integers(1, 60))),
            'written': text(1),
        }
        for _ in range(num)
    ]


def write_tasks(folder, docs, kinds=tuple(KINDS)):
    """Writes the task files and their data to a directory."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / 'documents.jsonl'
    data.write_text(''.join(json.dumps(doc) + '\n' for doc in docs))
    source = f'dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\ntest_split: test\n'
    for kind in kinds:
        (folder / f'{kind}.yaml').write_text(KINDS[kind].lstrip() + source)
    return folder
