"""Measured figures of README and the documentation, compared with the results in benchmarks/results.

Each function yields the phrases that a page must contain, formatted from the results. Other tests compare the tables of
`benchmarks/runs.py`, `benchmarks/serve_options.py`, `benchmarks/async_rollouts.py` and `benchmarks/soak.py`.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.benchmarks import training_figures
from tests.conftest import ROOT

# Reads a file of benchmarks/results by its name.
Read = Callable[[str], Any]
GIB, GB = 2**30, 1e9
PEERS = ('maxlm', 'torch', 'torch, compiled', 'transformers', 'transformers, compiled')
DECODERS = ('maxlm', 'llama.cpp', 'transformers', 'maxlm int8', 'maxlm w8a8', 'llama.cpp q8_0')
W8A8_PAIR = 'maxlm w8a8 / llama.cpp q8_0'


def read(name: str) -> Any:
    return json.loads((ROOT / f'benchmarks/results/{name}.json').read_text())


def row(*cells: object) -> str:
    return f'| {" | ".join(map(str, cells))} |'


def half_up(value: float) -> float:
    """Returns a value whose second digit is rounded up from a half. Binary fractions of halves may be below them."""
    return value + 1e-9


def bound(value: float, digits: int) -> str:
    """Returns the smallest number of a few digits that is at least `value`, as a power of ten."""
    exponent = math.floor(math.log10(value))
    mantissa = math.ceil(value / 10.0 ** (exponent - digits + 1) - 1e-6) / 10 ** (digits - 1)
    return f'{mantissa:.{digits - 1}f}e{exponent}'


def range_of(values: Any, form: str = '.2f', between: str = '–') -> str:
    values = list(values)
    return between.join(f'{value:{form}}' for value in (sorted({min(values), max(values)})))


def readme(read: Read) -> Iterator[str]:
    (kills,) = read('soak_cpu2')['kill']['figures']
    total, compared = re.match(r'(\d+) kills .*: 0 of (\d+); no step lost', kills).groups()
    yield f'in {total} `kill -9` on 2 CPU cores no step was lost, and none of {compared} compared runs differed'
    runs = read('posttraining_cpu2')['results']['arithmetic']
    first, last = ([run['evaluations'][place]['accuracy'] for run in runs] for place in (0, -1))
    seconds = range_of([run['rl_seconds'] for run in runs], '.0f')
    yield f'from {range_of(map(half_up, first))} to {range_of(map(half_up, last))} (three seeds) in {seconds} s'
    of_clients = {(each['answers'], each['clients']): each for each in read('serve_cpu2')['results']}
    rates = [of_clients['mixed', 8][side]['tokens_per_second'] for side in ('maxlm', 'transformers')]
    yield f"generates {rates[0]:.0f} tokens/s, and Transformers' `generate` {rates[1]:.0f} tokens/s"
    memory = read('hf_memory_cpu2')
    yield (
        f'The export of a {memory["parameters"] / GB:.1f}B model needs {memory["export_peak_bytes"] / GB:.2f} GB of '
        f'memory, and the import {memory["import_peak_bytes"] / GB:.2f} GB'
    )
    yield from status(read)
    yield f'{range_of([each["ratio"] for each in read("peers_cpu2")["results"]])} times the throughput'


def status(read: Read) -> Iterator[str]:
    mfu = f'{100 * read("1b_h200")["mfu_causal"]:.1f} % MFU'
    yield f'trains with {mfu}, and a GPT-2 of 1.3B with {read("peers_h200")["ratio"]:.2f} of the speed of PyTorch'


def performance(read: Read) -> Iterator[str]:
    plain, current, delayed, _ = (
        program['elementwise_gb'] for program in read('fp8_scaling_h100_compiled')['programs']
    )
    yield f'They move {delayed:.1f} GB outside matrix products and attention, {current:.1f} GB with current scaling'
    yield f'and {plain:.1f} GB in bfloat16.'
    programs = read('fp8_kernels_h100_compiled')['programs']
    for each in programs:
        sizes = (each['elementwise_gb'], each['causes_gb']['matrix products'])
        yield f'| {sizes[0]:.1f} | {sizes[1]:.1f} | {each["kernels"]:,.0f} | {1e3 * each["step_seconds"]:.0f} |'
    ratio = programs[1]['step_seconds'] / programs[3]['step_seconds']
    yield f'planned to be {ratio:.2f} times as fast as bfloat16 with norm kernels'
    seconds = [each['compile_cpu_seconds'] for each in programs]
    yield f'{seconds[3]:.0f} s of processor time instead of {seconds[2]:.0f} s'
    changes = [100 * each['relative_difference'] for each in read('fp8_loss_cpu2')['runs'] if 'fp8' in each['variant']]
    error = statistics.stdev(changes) / len(changes) ** 0.5
    yield f'by {-statistics.fmean(changes):.2f} % ± {error:.2f} % (mean and standard error of {len(changes)} seeds)'
    yield f'between {-min(changes):.2f} % lower and {max(changes):.2f} % higher'
    tiny = read('tiny_cpu2')
    yield f'{tiny["parameters"] / 1e6:.1f}M parameters, {tiny["global_batch"]} × {tiny["window"]} tokens a step'
    yield f'{round(tiny["tokens_per_second"], -1):,.0f} tokens/s, {100 * tiny["mfu_causal"]:.0f} % of the '
    yield f'of the {tiny["peak_tflops"]:.2f} TFLOP/s of a large matrix product'
    first = read('startup_cpu2')['first_step']
    yield f'{first["cold"]["wall"]:.1f} s without and {first["warm"]["wall"]:.1f} s with a compilation cache'
    assert max(each['wall'] for each in read('startup_cpu2')['help'].values()) <= 0.3
    memory = read('hf_memory_cpu2')
    yield (
        f'export {memory["export_peak_bytes"] / GB:.2f} GB, import {memory["import_peak_bytes"] / GB:.2f} GB; '
        f'the largest tensor is {memory["largest_tensor_bytes"] / GB:.2f} GB'
    )
    data = read('data_cpu2')
    rates = {name: f'{rate / 1e6:.0f}M' for name, rate in data['tokens_per_second'].items()}
    yield f'maxlm {rates["maxlm"]} tokens/s with five arrays'
    yield (
        f'slices stacked {rates["memmap, slices stacked"]}, rows filled {rates["memmap, rows filled"]}, with the five '
        f'arrays {rates["memmap, rows filled, with the five arrays"]}'
    )
    (torch,) = (rate for name, rate in rates.items() if name.startswith('PyTorch'))
    (grain,) = (rate for name, rate in rates.items() if name.startswith('grain'))
    yield f'over a memmap {torch}, grain over the same records {grain}'
    each = data['microseconds_per_window']
    record = each['seek and read of ArrayRecord']
    yield (
        f'{each["order"]:.1f} µs for its place in the order, {record:.1f} for seeking and reading ArrayRecord, '
        f'{each["complete read"] - record:.1f} for the rest of reading and {each["arrays"]:.1f} for the arrays'
    )
    orders = data['order'].values()
    yield f'{max(order["microseconds"] for order in orders):.0f} µs per window, '
    yield f'{max(order["bytes"] for order in orders) / 1e6:.1f} MB in each case'
    rates = read('tokenize_cpu2')['bytes_per_second']
    yield f'{rates["prepare"] / 1e6:.1f} MB/s, including process start'
    yield f'alone, from memory, {rates["library"] / 1e6:.1f} MB/s'
    for result in read('peers_cpu2')['results']:
        times = [f'{1e3 * result["seconds"][side]:.1f}' for side in PEERS]
        share = f'{result["share_of_peak"]:.0%}'
        yield row(result['size'], result['threads'], *times, f'{result["ratio"]:.2f}', share)
    ratios = {threads: [] for threads in (1, 2)}
    for result in read('peers_cpu2')['results']:
        ratios[result['threads']].append(result['ratio'])
    single = range_of([100 * ratio - 100 for ratio in ratios[1]], '.0f', ' to ')
    yield f'With one thread, maxlm is {single} % faster than the fastest peer'
    yield f'the ratios are {range_of(ratios[2], between=" to ")}'
    for size in ('small', '0.1b'):
        for result in read(f'decode_peers_{size}_cpu2')['results']:
            rates = [f'{result["tokens_per_second"][side]:,.0f}' for side in DECODERS]
            yield row(size, result['streams'], *rates)
    turns = read('decode_peers_small_cpu2')['results'][0]['turns']['maxlm w8a8']
    yield f'for w8a8 from {range_of(turns, ",.0f", " to ")} tokens/s'
    both = [each for size in ('small', '0.1b') for each in read(f'decode_peers_{size}_cpu2')['results']]
    yield f'reaches {range_of([each["ratios"]["maxlm / llama.cpp"] for each in both], between=" to ")} of the rate'
    small, large = (' and '.join(f'{each["ratios"][W8A8_PAIR]:.2f}' for each in pair) for pair in (both[:2], both[2:]))
    yield f'reaches {large} of the rate of llama.cpp for 0.1b, and {small} for the small model'
    yield from decoding(read)
    programs = read('norm_kernel_programs')
    before, after, later = (*(programs['programs'][0][name] for name in ('xla', 'pallas')), programs['later'])
    yield (
        f'moves {later["traffic"] / GB:.0f} GB in {later["kernels"]:,} kernels, instead of '
        f'{before["traffic"] / GB:.0f} GB in {before["kernels"]:,}'
    )
    yield f'The norm kernels save {(before["traffic"] - after["traffic"]) / GB:.0f} GB'
    yield from step_programs(read)
    yield from overlap(read)
    yield from loop(read)
    yield from growth(read)


def decoding(read: Read) -> Iterator[str]:
    found = read('decode_program_h100')
    for before, after in zip(found['before'], found['results'], strict=True):
        for version, result in (('before', before), ('now', after)):
            sizes = [f'{result[key] / 1e9:.2f}' for key in ('bytes_per_pass', 'bytes_per_call')]
            yield row(result['slots'], version, result['kernels_per_pass'], *sizes)
        yield f'{after["weight_and_cache_bytes"] / 1e9:.2f} GB'


def step_programs(read: Read) -> Iterator[str]:
    columns, programs = ('before', 'xla', 'pallas'), read('step_programs_h100')['programs']
    sizes = {name: [program[name]['traffic'] for program in programs] for name in columns}
    for (before, now), verb in ((columns[:2], 'steps on eight GPUs'), (columns[1:], 'norm kernels')):
        saved = [100 - 100 * after / first for first, after in zip(sizes[before], sizes[now], strict=True)]
        yield f'{verb} by {range_of(saved, ".0f", " % to ")} %'
    for program in programs:
        name = program['config'].removeprefix('configs/').replace('.py', '')
        forms = (('traffic', GB, ',.0f'), ('kernels', 1, ',.0f'), ('memory_bytes', GIB, '.1f'))
        yield row(name, *(f'{program[each][key] / unit:{form}}' for key, unit, form in forms for each in columns))
    neox, *_, code = ({each: program[each]['causes_gb'] for each in columns} for program in programs)
    yield f'({neox["pallas"]["norm"]:.0f} GB instead of {neox["xla"]["norm"]:.0f})'
    attention, copies = 'attention inputs and outputs', 'copies and concatenations'
    yield f'from {neox["xla"][attention]:.0f} to {neox["pallas"][attention]:.0f} GB'
    yield f'({neox["xla"][copies]:.0f} to {neox["pallas"][copies]:.0f} GB)'
    assert code['xla'][copies] == code['pallas'][copies]
    yield f'keeps its {code["pallas"][copies]:.0f} GB of copies'


def overlap(read: Read) -> Iterator[str]:
    for program, result in read('tpu_overlap').items():
        for options, name in (('with_options', 'maxlm'), ('without', 'default')):
            found = result[options]['overlap']
            cells = []
            for kind in ('all-gather', 'all-reduce', 'collective-permute'):
                each = found.get(kind, {'seconds': 0.0, 'share': 0.0})
                cells += [f'{1e3 * each["seconds"]:.0f}', f'{each["share"]:.0%}' if each['seconds'] else '']
            total = found['total']
            cells += [f'{1e3 * total["seconds"]:.0f}', f'{1e3 * (total["seconds"] - total["hidden"]):.0f}']
            if program.startswith('v5p') and name == 'maxlm':
                # maxlm sets no options for this chip.
                continue
            yield re.sub(r' +', ' ', row(f'`{program}`', name, *cells))


def loop(read: Read) -> Iterator[str]:
    results = read('loop_cpu2')
    for name, label in (
        ('share_of_bare', 'throughput of the run without evaluation / throughput of the bare step'),
        ('share_of_quiet', 'throughput with all telemetry / without telemetry'),
    ):
        each = results[name]
        yield row(label, f'{each["median"]:.2f} ({each["min"]:.2f}–{each["max"]:.2f})')
    for name, label in (
        ('save_share', 'share of the time in which saves delayed steps'),
        ('data_wait_share', 'waits for data'),
    ):
        yield row(label, f'{100 * results[name]["median"]:.1f} %')
    start = {name: f'{each["median"]:.0f} s' for name, each in results['start'].items()}
    yield f'(bare step: {start["bare_cold"]}, {start["bare_warm"]}) | {start["train_cold"]}, {start["train_warm"]} |'


def growth(read: Read) -> Iterator[str]:
    axes = read('growth_cpu2')['axes']
    for name in ('depth', 'width', 'context', 'vocabulary', 'batch', 'accumulation'):
        curves = {curve['name']: curve for curve in axes[name]['curves']}
        exponents = [
            f'{curves[each]["exponent"]:.2f}, at the end {curves[each]["last_exponent"]:.2f}'
            for each in ('step time', 'step memory')
        ]
        yield f'{exponents[0]} | {exponents[1]} | {curves["compile time"]["exponent"]:.2f}'
    (planned,) = axes['planned']['curves']
    yield f'A plan takes {1e3 * planned["values"][0]:.0f} ms for 8 devices and {1e3 * planned["values"][-1]:.0f} ms'
    index = axes['windows']['curves'][0]['values']
    assert index[0] == pytest.approx(index[-1], rel=0.05)
    yield f'The data index has {index[-1] / 1e3:.0f} kB'
    placement = axes['devices']['curves'][0]
    yield f'placing a batch takes {1e3 * placement["values"][-1]:.0f} ms'


def results_page(read: Read) -> Iterator[str]:
    yield from training_figures.nanochat(read)
    step, fp8, peers = read('1b_h200'), read('1b_fp8_h200'), read('peers_h200')
    yield f'({100 * step["mfu_full"]:.1f} % full), compiled in {step["compile_seconds"]:.0f} s'
    yield f'compiled in {fp8["compile_seconds"]:.0f} s'
    yield f'of which the run used {step["peak_memory_bytes"] / GIB:.1f}'
    memory = [f'{peers["sides"][side]["peak_memory_bytes"] / GIB:.1f} GiB' for side in ('maxlm', 'torch')]
    yield f'{memory[0]} and {memory[1]}'
    losses = [peers['sides'][side]['losses'] for side in ('maxlm', 'torch')]
    largest = max(abs(one - other) for one, other in zip(*losses, strict=True))
    yield f'the losses of {len(losses[0])} steps agree within {bound(largest, 1)}'
    checks = read('attention_h200')['checks']
    largest = max(check['errors']['documents'] for check in checks)
    yield f'largest error of a token {100 * largest:.1f} %'
    yield f'for {len(checks)} shapes and packings'
    one, many = read('decode_1b_h200')['results']
    yield f'{round(many["tokens_per_second"], -1):,.0f} for 32'
    yield f'{100 * one["share"]:.0f} % and {100 * many["share"]:.0f} % of the memory bandwidth'
    runs = read('runs_cpu2')['results']
    gains = [a['curve'][-1][1] - b['curve'][-1][1] for a, b in zip(runs['tiny'], runs['moe'], strict=True)]
    assert min(gains) > 0
    yield f'by {sum(gains) / len(gains):.3f} on average'
    spikes = {steps: set() for steps in (5, 35)}
    for run in read('adamw_warmup_cpu2')['runs']:
        spikes[run['warmup_steps']] |= {run['seed']} if run['spikes'] else set()
    yield f'for {len(spikes[5])} of 4 seeds with a warm-up of 5 steps'
    assert not spikes[35]


def serving(read: Read) -> Iterator[str]:
    sides = ('maxlm', 'transformers')
    for result in read('serve_cpu2')['results']:
        cells = [
            f'{result[side][name]:{form}}'
            for side in sides
            for name, form in (('tokens_per_second', '.0f'), ('first_token_seconds', '.2f'))
        ]
        yield row(result['clients'], *cells, f'{result["ratio"]:.2f}')
    mixed, equal = (each['maxlm']['gap_p99_seconds'] for each in read('serve_32_cpu2')['results'])
    yield f'is {mixed:.2f} s for the answers of 8 to 184 tokens, and {equal:.2f} s for those of 96 tokens'
    for result in read('serve_0.1b_cpu2')['results']:
        ours, theirs = (result[side] for side in sides)
        yield row(
            {'mixed': '8 to 184 tokens', 'equal': '96 tokens'}[result['answers']],
            f'{ours["tokens_per_second"]:.0f}',
            f'{ours["first_token_seconds"]:.2f}',
            f'{theirs["tokens_per_second"]:.0f}',
            f'{theirs["first_token_seconds"]:.1f}',
            f'{result["ratio"]:.2f}',
        )
    hostile = read('serve_options_cpu2')['hostile']
    idle, attacked = hostile['idle']['p99'], hostile['attacked']['p99']
    yield f'p99 is {attacked:.3f} s, compared with {idle:.3f} s for an idle server ({hostile["p99_ratio"]:.2f} ×, '
    yield f'{hostile["p99_ratio"]:.2f} ×, {hostile["requests"]} requests'
    one, many = (100 * each['share'] for each in read('decode_1b_h200')['results'])
    yield f'it is {one:.0f} % for one sequence and {many:.0f} % for 32'


def evaluation(read: Read) -> Iterator[str]:
    for result in read('evaluation_cpu2')['results']:
        task = result['task'].replace('whole', 'complete')
        peer = f'{result["hf"]:.2f} (batch {result["hf_batch"]})'
        yield row(task, f'{result["maxlm"]:.2f}', peer, f'{result["ratio"]:.2f}')


def plan(read: Read) -> Iterator[str]:
    for run in read('process_memory_cpu2')['runs']:
        yield row(run['run'].replace(' x ', ' × '), f'{run["planned_gib"]:.2f} GiB', f'{run["peak_gib"]:.2f} GiB')
    *ratios, last = sorted(case['ratio'] for case in read('plan_cpu2')['cases'].values())
    yield f'was {", ".join(f"{ratio:.2f}" for ratio in ratios)} and {last:.2f} for six configs'


def huggingface(read: Read) -> Iterator[str]:
    memory = read('hf_memory_cpu2')
    for name in ('export', 'import'):
        yield row(name, f'{memory[f"{name}_peak_bytes"] / GB:.2f} GB')
    models = read('real_models_cpu')['models'].values()
    largest = {name: max(model[name] for model in models) for name in next(iter(models))}
    logits, losses = bound(largest['largest_logit_difference'], 2), bound(largest['loss_difference'], 2)
    yield f'Logits differ by at most {logits} and losses by {losses}'
    yield f"differs from PEFT's by {bound(largest['lora_first_loss_difference'], 2)}"
    assert {model['equal_texts'] for model in models} == {model['equal_texts_of_llama_cpp'] for model in models} == {20}
    int8, int4 = ([100 * model[f'relative_{kind}_loss_difference'] for model in models] for kind in ('int8', 'int4'))
    yield f'int8 raises the losses by {int8[0]:.1f} and {int8[1]:.2f} %, and int4 by {int4[0]:.0f} and {int4[1]:.0f} %'


def quantization(read: Read) -> Iterator[str]:
    found = read('quantized_loss_cpu2')
    for name in ('int8', 'w8a8', 'int4', 'w4a8'):
        yield row(f'`{name}`', f'{100 * found["relative_difference"][name]:+.2f} %')
    yield f'{found["tokens"]:,} tokens'


def posttraining(read: Read) -> Iterator[str]:
    model = read('logprob_difference_cpu2')['results']['SmolLM2-135M']
    float32, bfloat16 = model['float32'], model['bfloat16']
    yield f'{float32["logprob_difference"]:.1e} in float32 and {bfloat16["logprob_difference"]:.2f} in bfloat16'
    yield f'{float32["approx_kl"]:.0e} and {bfloat16["approx_kl"]:.0e}'
    for runs in (
        runs for file in ('posttraining_cpu2', 'environments_cpu2') for runs in read(file)['results'].values()
    ):
        for name in ('accuracy', 'pass_at_1'):
            ends = [[run['evaluations'][place][name] for place in (0, -1)] for run in runs]
            yield ', '.join(' → '.join(f'{half_up(value):.2f}' for value in pair) for pair in ends)
        yield ', '.join(range_of([run[f'{phase}_seconds'] for run in runs], '.0f') for phase in ('sft', 'rl'))


def reliability(read: Read) -> Iterator[str]:
    results = read('replay_faults_cpu2')
    matter = sum(each['matter'] for kinds in results['flips'].values() for each in kinds.values())
    yield f'All {matter} flips that matter'
    cost = results['cost']
    yield f'In a run of {cost["steps"]:,} steps at a fraction of 0.0025, {cost["replayed"]:.0f} steps were replayed'
    yield f'took {100 * cost["measured_share"]:.2f} % of the time of the steps'
    times = cost['replay_seconds'] / cost['step_seconds']
    yield f'A replay took {times:.1f} times as long as a step of {1e3 * cost["step_seconds"]:.0f} ms'


def layouts(read: Read) -> Iterator[str]:
    gaps = read('moments_cpu2')['gap']
    for name in ('bfloat16', 'int8'):
        yield row(f'`{name}`', f'+{100 * gaps[name][0]:.2f} %')


def training(read: Read) -> Iterator[str]:
    before, after = read('first_token_cpu2')['nats_per_token'].values()
    yield f'is {after["first token"]:.2f} instead of {before["first token"]:.2f} nats'
    yield f'{after["all tokens"]:.3f} instead of {before["all tokens"]:.3f}'
    yield f'the others have {after["without prefix"]:.3f} and {before["without prefix"]:.3f}'


def elastic(read: Read) -> Iterator[str]:
    figures = read('soak_cpu2')['elastic']['figures']
    (three,) = (figure for figure in figures if figure.startswith('3 hosts'))
    loss, back = re.search(r'more steps (\d+) s after the loss of rank 0, and (\d+) s after the return', three).groups()
    yield f'three more steps {loss} s after the loss of rank 0, and again {back} s after a host returned'


PAGES: dict[str, Callable[[Read], Iterator[str]]] = {
    'README.md': readme,
    'docs/index.md': status,
    'docs/performance.md': performance,
    'docs/results.md': results_page,
    'docs/serving.md': serving,
    'docs/evaluation.md': evaluation,
    'docs/plan.md': plan,
    'docs/huggingface.md': huggingface,
    'docs/quantization.md': quantization,
    'docs/posttraining.md': posttraining,
    'docs/reliability.md': reliability,
    'docs/layouts.md': layouts,
    'docs/training.md': training,
    'docs/launch/elastic.md': elastic,
    'docs/leaderboard.md': training_figures.leaderboard,
    'docs/tutorials/chat.md': training_figures.chat_tutorial,
    'docs/tutorials/fine-tune.md': training_figures.fine_tuning_tutorial,
    'docs/negative-results.md': training_figures.negative_results,
    'docs/optimizers.md': training_figures.width_transfer,
}


def missing(page: str, text: str, read: Read) -> list[str]:
    """Returns the phrases that a text of a page lacks; line breaks and repeated blanks count as one blank."""
    text = ' '.join(text.split())
    return [phrase for phrase in PAGES[page](read) if ' '.join(phrase.split()) not in text]


@pytest.mark.parametrize('page', PAGES)
def test_pages_have_the_measured_figures(page):
    assert missing(page, (ROOT / page).read_text(), read) == []


@pytest.mark.parametrize('page', PAGES)
def test_other_figures_are_found(page):
    # Without its digits, a page lacks every phrase.
    text = re.sub(r'\d', '', (ROOT / page).read_text())
    assert missing(page, text, read) == list(PAGES[page](read))


def programs_in(page: str) -> list[list[str]]:
    """Returns the cells of the table of compiled programs for GPUs."""
    table = page.split('| program | on | memory, GiB |')[1].split('\n\n')[0]
    return [[cell.strip() for cell in line.strip('|').split('|')] for line in table.splitlines()[2:]]


def test_the_table_of_compiled_programs_has_recorded_programs():
    recorded = {
        (
            re.search(r'configs/(.+)', program['config'])[1].replace('.py', ''),
            program['target'],
            f'{program["total"] / GIB:.0f}',
            f'{program["traffic"] / GB:,.0f}',
            f'{program["seconds"]:.3g}',
            f'{program["mfu"]:.0%}',
        )
        for program in json.loads((ROOT / 'tests/planning/estimate/programs.json').read_text())
        if program['platform'] == 'gpu'
    }
    rows = programs_in((ROOT / 'docs/performance.md').read_text())
    assert len(rows) >= 20
    shown = {
        (name.partition(',')[0], target, memory, traffic, *rest[-2:]) for name, target, memory, traffic, *rest in rows
    }
    assert shown - recorded == set()


TARGETS = {
    '8 × H100': 'h100:8',
    '16 × H100, 2 nodes': 'h100:8x2',
    '2 × RTX 4090': 'rtx4090:2',
    '16 × v4': 'v4:2x2x4',
}


def test_the_memory_per_device_is_that_of_recorded_programs():
    programs = json.loads((ROOT / 'tests/planning/estimate/programs.json').read_text())
    recorded = {(program['config'], program['target'], f'{program["total"] / GIB:.0f}') for program in programs}
    table = (ROOT / 'docs/models.md').read_text().split('| model | batch per device | on | GiB |')[1].split('\n\n')[0]
    rows = [[cell.strip() for cell in line.strip('|').split('|')] for line in table.splitlines()[2:]]
    shown = {(f'configs/{name.split("`")[1]}', TARGETS[devices], memory) for name, _, devices, memory in rows}
    assert len(shown) == len(rows) > 5
    assert shown - recorded == set()
