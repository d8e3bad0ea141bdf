"""Evaluates checkpoints and prints or writes the results."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from maxlm.cli.hints import print_generate
from maxlm.data.loader.dataset import TrainingData, open_training_data
from maxlm.errors import EXIT_DONE, InputError, escape_controls
from maxlm.evaluation.output import output_directory
from maxlm.evaluation.perplexity import HeldOut, bits_per_byte, draw_positions, make_token_losses, measure
from maxlm.evaluation.statistics import Measure, exponential_of
from maxlm.evaluation.table import Column, table_json, table_text
from maxlm.evaluation.tasks.code import ProgramsConfig
from maxlm.evaluation.tasks.lm_eval_tasks import Benchmarks
from maxlm.evaluation.tasks.questions import QUESTIONS
from maxlm.evaluation.tasks.runner import EvalOptions, EvalResult, EvalRun, parse_tasks
from maxlm.inference.load import LoadedModel, load_model
from maxlm.log import Console, progress_bar
from maxlm.storage.atomic import atomic_write
from maxlm.storage.json_text import finite_json, strings_in
from maxlm.telemetry.metrics import perplexity
from maxlm.workdir.files import EVALUATION_FILE

# Number of answers to questions:FILE that are printed. --output writes all.
SHOWN_ANSWERS = 20


class Evaluated(NamedTuple):
    """Results of one checkpoint: the loss on held-out text with related values, and the task results."""

    name: str
    checkpoint: str
    step: int
    loss: dict[str, Any]
    held_out: HeldOut | None
    measures: list[Measure]
    tasks: EvalResult | None


def execute(options: argparse.Namespace) -> int:
    """Prints loss, perplexity, bits per byte, and the unigram entropy that a model must beat; or a table."""
    assessment = None
    if options.tasks:
        assessment = EvalRun(parse_tasks(options.tasks), _assessment_config(options))
    found = []
    for checkpoint in options.checkpoint:
        with Console(stderr=True):
            model = load_model(checkpoint, num_devices=jax.device_count())
        found.append(_evaluate(checkpoint, model, assessment, options))
        del model
    if options.output:
        _write(Path(options.output), found)
    if len(found) == 1 and not options.tasks:
        (one,) = found
        print(finite_json(one.loss) if options.json else _loss_text(one))
    else:
        columns = [Column(one.name, one.measures) for one in found]
        if not options.json:
            _print_answers(found)
        print(finite_json(_as_json(found)) if options.json else table_text(columns))
    if not options.json:
        print_generate(options.checkpoint[0])
    return EXIT_DONE


def export_texts(options: argparse.Namespace) -> int:
    """Writes a line {"task", "text"} for each document of lm-eval tasks, where the text is a list of all its strings.

    Raises:
        InputError: a task is not an lm-eval task or cannot be loaded, or the file cannot be written.
    """
    file, parsed = options.export_texts, parse_tasks(options.tasks)
    if parsed.core or parsed.suites or parsed.needle:
        raise InputError(
            f'--export-texts={file}: --tasks={options.tasks} has tasks that are not of lm-eval; remove them, and give '
            'the path of other evaluation texts directly to maxlm prepare --filter decontaminate:PATH'
        )
    benchmarks = Benchmarks(parsed.benchmarks, folder=options.tasks_path, limit=options.limit)
    lines = [
        json.dumps({'task': task, 'text': list(dict.fromkeys(strings_in(document)))}, ensure_ascii=False) + '\n'
        for task, document in benchmarks.documents()
    ]
    atomic_write(Path(file), ''.join(lines))
    print(finite_json({'documents': len(lines)}) if options.json else f'{file}: {len(lines):,} documents')
    return EXIT_DONE


def _assessment_config(options: argparse.Namespace) -> EvalOptions:
    lengths = None
    if options.needle_lengths:
        try:
            lengths = tuple(sorted(int(part) for part in options.needle_lengths.split(',')))
        except ValueError:
            raise InputError(f'--needle-lengths={options.needle_lengths}: must be comma-separated numbers') from None
    return EvalOptions(
        folder=options.tasks_path,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        chat=options.apply_chat_template,
        programs=ProgramsConfig(options.samples, options.max_tokens, options.temperature, options.seed),
        needle_lengths=lengths,
        needle_trials=options.needle_trials,
        num_slots=options.num_slots,
    )


def _evaluate(
    checkpoint: str, model: LoadedModel, assessment: EvalRun | None, options: argparse.Namespace
) -> Evaluated:
    name = f'{Path(checkpoint.partition("@")[0]).name}@{model.step}'
    if len(options.checkpoint) > 1 and _is_ambiguous(checkpoint, options.checkpoint):
        name = checkpoint
    loss: dict[str, Any] = {}
    measures: list[Measure] = []
    held_out = None
    if assessment is None or options.data:
        held_out, loss, measures = _held_out(model, options)
    tasks = None
    if assessment is not None:
        tasks = assessment.run(model, show=not options.json)
        measures = [*measures, *tasks.measures]
        if options.output:
            tasks.write(Path(options.output) / name.replace('/', '_'), step=model.step, title=name)
    return Evaluated(name, checkpoint, model.step, loss, held_out, measures, tasks)


def _is_ambiguous(checkpoint: str, checkpoints: list[str]) -> bool:
    names = [Path(other.partition('@')[0]).name for other in checkpoints]
    folders = {other.partition('@')[0] for other in checkpoints}
    mine = Path(checkpoint.partition('@')[0]).name
    return names.count(mine) > 1 and len({folder for folder in folders if Path(folder).name == mine}) > 1


def _held_out(model: LoadedModel, options: argparse.Namespace) -> tuple[HeldOut, dict[str, Any], list[Measure]]:
    """Returns the held-out losses, the values for JSON, and the measures for the table."""
    # Measure the loss of text, even if the model was last trained on another objective.
    config = dataclasses.replace(model.config, train=dataclasses.replace(model.config.train, objective='next_token'))
    data = dataclasses.replace(config.data, path=options.data, sources=()) if options.data else config.data
    corpus = open_training_data(data, with_sources=config.metrics.per_source_loss)
    num_tokens, text_bytes = _check(corpus, model)
    batches = corpus.validation_batches(
        config.train.global_batch_size,
        options.num_batches,
        model.layout.local_rows(config.train.global_batch_size),
    )
    with (
        corpus.fetcher(None, 0),
        progress_bar('evaluate', total=len(batches), unit='batch', show=not options.json) as bar,
    ):

        def read(index: int) -> dict[str, np.ndarray]:
            bar.update()
            return batches[index]

        held_out = measure(
            make_token_losses(config, model.layout),
            model.params,
            map(read, range(len(batches))),
            layout=model.layout,
            global_batch=config.train.global_batch_size,
        )
    loss = held_out.loss()
    measures = [loss, exponential_of('perplexity', loss)]
    if text_bytes:
        measures.append(bits_per_byte(loss, num_tokens / text_bytes))
    by_source = held_out.source_losses(corpus.names)
    losses = {part.name.removeprefix('loss/'): part.value for part in by_source}
    values = {
        'step': model.step,
        'loss': loss.value,
        'perplexity': perplexity(loss.value),
        # Independent of the tokenizer: nats per token are converted to bits per byte with the ratio of the split. For
        # data that was added as tokens, the number of bytes is unknown.
        'bits_per_byte': measures[-1].value if text_bytes else None,
        'unigram_entropy': corpus.unigram_entropy,
        'tokens': int(held_out.tokens_W.sum()),
        **({'by_source': {name: losses.get(name, math.nan) for name in corpus.names}} if corpus.names else {}),
    }
    return held_out, values, [*measures, *by_source]


def _check(corpus: TrainingData, model: LoadedModel) -> tuple[int, int]:
    """Returns the numbers of tokens and bytes of the validation data.

    Raises:
        InputError: the data has another tokenizer than the model, or there is no validation data.
    """
    dataset = corpus.first
    # Do not compare bytes: an external file can be formatted differently and be equivalent.
    if dataset.load_tokenizer().ids_sha256 != model.tokenizer.ids_sha256:
        raise InputError(
            f'{dataset.tokenizer_path} is not the tokenizer that the model was trained with; '
            f'prepare the data with --tokenizer {model.tokenizer_path}'
        )
    num_tokens, text_bytes = corpus.validation_counts
    if not num_tokens:
        raise InputError(f'{dataset.path} has no validation documents; prepare it with --validation PATH')
    return num_tokens, text_bytes


def _print_answers(found: list[Evaluated]) -> None:
    """Prints the answers to the first questions of `questions:FILE`, with the expected ones of wrong answers."""
    for one in found:
        for record in [] if one.tasks is None else one.tasks.records.get(QUESTIONS, [])[:SHOWN_ANSWERS]:
            wrong = '' if record['exact'] else f'  (expected: {record["expected"]})'
            name = f'{one.name}  ' if len(found) > 1 else ''
            print(escape_controls(f'{name}{record["question"]}  {record["answer"]}{wrong}'))


def _loss_text(one: Evaluated) -> str:
    values, held_out = one.loss, one.held_out
    assert held_out is not None
    bits = '' if values['bits_per_byte'] is None else f'{values["bits_per_byte"]:.3f} bits/byte '
    lines = [
        f'step {one.step}: loss {values["loss"]:.4f} nats/token, perplexity {values["perplexity"]:.2f}, '
        f'{bits}over {values["tokens"]:,} tokens; '
        f'unigram entropy of the data {values["unigram_entropy"]:.4f} nats/token'
    ]
    interval = held_out.loss().interval
    if interval is not None:
        lines.append(f'  95 % confidence interval: loss {interval[0]:.4f} to {interval[1]:.4f}')
    lines += [f'  {name}: loss {loss:.4f}' for name, loss in values.get('by_source', {}).items()]
    positions = '  '.join(f'{first}: {loss:.3f}' for first, _, loss in held_out.by_position())
    return '\n'.join([*lines, f'  by context tokens, from: {positions}'])


def _as_json(found: list[Evaluated]) -> dict[str, Any]:
    checkpoints = []
    for one in found:
        document = {'name': one.name, 'checkpoint': one.checkpoint, 'step': one.step, **one.loss}
        if one.held_out is not None:
            document['loss_interval'] = one.held_out.loss().interval
            document['by_position'] = [
                {'first': first, 'last': last, 'loss': loss} for first, last, loss in one.held_out.by_position()
            ]
        if one.tasks is not None:
            document['tasks'] = {
                part.name: {'value': part.value, 'interval': part.interval} for part in one.tasks.measures
            }
        checkpoints.append(document)
    return {'checkpoints': checkpoints, 'table': table_json([Column(one.name, one.measures) for one in found])}


def _write(folder: Path, found: list[Evaluated]) -> None:
    """Writes evaluation.json, table.txt and, if losses were measured, positions.png."""
    with output_directory(folder):
        (folder / EVALUATION_FILE).write_text(finite_json(_as_json(found), indent=2) + '\n', encoding='utf-8')
        table = table_text([Column(one.name, one.measures) for one in found])
        (folder / 'table.txt').write_text(table + '\n', encoding='utf-8')
        curves = {one.name: one.held_out.by_position() for one in found if one.held_out is not None}
        if curves:
            draw_positions(curves, 'Loss by number of context tokens').savefig(folder / 'positions.png', dpi=150)
