"""Converts multiple-choice questions: `maxlm questions --input hf:GBaker/MedQA-USMLE-4-options --output data/medqa`.

Writes OUTPUT/prompts.jsonl for grpo.prompts with the reward `choice`, OUTPUT/held_out.jsonl for grpo.eval_prompts, and
OUTPUT/texts.jsonl, the questions with their answers, for maxlm prepare. Held-out questions are only in the second file.
"""

from __future__ import annotations

from pathlib import Path

from maxlm.cli.hints import print_next
from maxlm.cli.parser import ArgumentParser, command_parser, number, text_argument
from maxlm.cli.process import run
from maxlm.errors import EXIT_DONE
from maxlm.storage.paths import ANY, Kind, PathOption


def main(argv: list[str]) -> int:
    """Writes the prompts and texts of the questions."""
    options = make_parser().parse_args(argv)

    from maxlm.rl.multiple_choice import TEXTS, QuestionFields, write_questions

    fields = QuestionFields(options.question_field, options.options_field, options.answer_field)
    training, evaluation = write_questions(options.input, Path(options.output), fields, held_out=options.held_out)
    print(f'{options.output}: {training:,} questions, and {evaluation:,} held out')
    print_next('maxlm', 'prepare', '--input', f'{options.output}/{TEXTS}', '--output', f'{options.output}-tokens')
    return EXIT_DONE


def make_parser() -> ArgumentParser:
    parser = command_parser(
        'questions',
        __doc__,
        '--input hf:cais/mmlu:all#test --output data/mmlu --options-field choices --answer-field answer',
    )
    parser.add_argument(
        '--input',
        type=PathOption(urls=ANY),
        required=True,
        metavar='PATH',
        help='.jsonl or .parquet files, a directory, a URL, or hf:NAME[:CONFIG][#SPLIT]',
    )
    parser.add_argument(
        '--output', type=PathOption(Kind.DIRECTORY), required=True, metavar='DIR', help='output directory'
    )
    for name, default, what in (
        ('--question-field', 'question', 'text of the question'),
        ('--options-field', 'options', 'list of options, or mapping of their letters'),
        ('--answer-field', 'answer_idx', 'letter or index of the correct option'),
    ):
        parser.add_argument(
            name, type=text_argument, default=default, metavar='NAME', help=f'field of the {what} (%(default)s)'
        )
    parser.add_argument(
        '--held-out',
        type=number(0, 0.5, float),
        default=0.05,
        metavar='X',
        help='fraction of the questions that are held out, selected by a hash (%(default)s)',
    )
    return parser


if __name__ == '__main__':
    run('questions')
