import dataclasses

from maxlm.reporting.page import section
from maxlm.reporting.run_summary import make_runs
from tests import workdirs


def with_samples(run, lines):
    return make_runs([dataclasses.replace(run.history, samples=lines)], workdirs.NOW)


def test_newest_samples_are_shown_and_escaped(run_of):
    text = section('samples', run_of('finished'))
    shown, _, folded = text.partition('<details>')
    assert 'step 400' in shown
    assert '<summary>3 earlier</summary>' in folded
    assert '&lt;script&gt;alert(1)&lt;/script&gt;' in shown
    assert '<script' not in text


def test_some_of_many_samples_are_shown_and_all_are_counted(run_of):
    (run,) = run_of('finished')
    lines = [{'step': step, 'prompt': f'p{n}', 'text': 'x' * 9000} for step in range(100) for n in range(10)]
    text = section('samples', with_samples(run, lines))
    assert '11 earlier of 99' in text
    assert '2 more prompts' in text
    assert 'step 0<' in text
    assert 'step 99<' in text
    assert len(text) < 300_000


def test_a_conversation_is_shown_with_its_whole_prompt_and_all_turns(run_of):
    (run,) = run_of('finished')
    tools = f'<|im_start|>system\nTools:\n{"{}" * 200}<|im_end|>\n'
    prompts = [f'{tools}<|im_start|>user\n{question}<|im_end|>\n' for question in ('2+3*4', '5-2*2')]
    turns = ''.join(f'turn {number}\n' for number in range(300))
    lines = [{'step': step, 'prompt': prompt, 'text': turns} for step in (1, 2) for prompt in prompts]
    text = section('samples', with_samples(run, lines))
    # The questions distinguish the headings.
    headings = text.split('<h3>')[1:]
    assert ['2+3*4' in heading.partition('</h3>')[0] for heading in headings] == [True, False]
    assert text.count('<summary>Whole prompt</summary>') == 2
    assert text.count('{}' * 200) == 2
    # The newest one is complete, and the earlier one is shortened.
    assert text.count('turn 299') == 2
    assert text.count('turn 0\n') == 4


def test_without_samples(run_of):
    assert section('samples', run_of('fresh')) == ''
