"""Every command, config key and function takes the same step of a workdir: the newest, unless another one is given.

The losses of the run rise, and only one of its steps has parameters, so that nothing can use another one unnoticed.
"""

import argparse
import io
import json
import logging
import re
import shutil

import pytest

import maxlm
from maxlm.checkpoint import listing
from maxlm.checkpoint.frozen_models import REWARD_MODEL, frozen_checksum
from maxlm.cli.commands import COMMANDS, module_of
from maxlm.cli.execution import serve
from maxlm.cli.hints import HINTS
from maxlm.config.keys import declared_keys
from maxlm.data.chat.template import CHATML
from maxlm.errors import EXIT_DONE, InputError, exit_code
from maxlm.workdir.files import CHAT_TEMPLATE
from maxlm.workdir.step_dirs import CHECKPOINTS_DIR
from tests.adapters import adapter_arrays
from tests.huggingface.workdirs import MODELS, make_workdir
from tests.serving.fake_engine import chat_tokenizer
from tests.small import model_keys, small_config

LOSSES = {2: 4.79, 4: 4.94, 6: 5.41}
NEWEST, BEST = 6, 2
USED = {
    '': 'using step 6 (5.4100), the newest; the lowest validation loss is that of step 2 (4.7900): ',
    '@best': 'using step 2 (4.7900), which has the lowest validation loss; the newest is step 6 (5.4100)',
}
SIZES = {**model_keys(dim=32, num_heads=4, num_layers=1, vocab_size=260, tie_embeddings=False), 'data__seq_len': 16}
SETTINGS = {**MODELS['llama'], **SIZES}
TRAIN = [
    '--config=tiny --config.data.path={data} --config.train.num_steps=1 --config.train.global_batch_size=8 '
    '--workdir={new} --config.train.check_kernels=false --config.metrics.tensorboard=false '
    '--config.train.init_from={run}',
    *(f'--config.{key.replace("__", ".")}={value}' for key, value in SETTINGS.items()),
]
# Arguments of the commands that use the parameters of a checkpoint.
USES = {
    'train': ' '.join([*TRAIN, '--config.distill.teacher={run}']),
    'distill': '--data={data} --teacher={run} --output={new} --seq-len=16 --top-k=4',
    'grpo': ' '.join(TRAIN).replace('data.path={data}', 'grpo.prompts={prompts}')
    + ' --config.train.objective=grpo --config.grpo.reward=length --config.grpo.num_generations=8 '
    '--config.grpo.max_completion_length=4 --config.eval.interval=0',
    'evaluate': '--checkpoint={run} --data={data} --num-batches=1',
    'generate': '--checkpoint={run} --prompt=a --max-tokens=2',
    'serve': '--checkpoint={run} --port=0 --slots=1',
    'chat': '{chat} --max-tokens=2',
    'quantize': '--checkpoint={run} --format=int8 --output={new} --no-eval',
    'checkpoints fetch': '{run} --output={new} --weights-only',
    'checkpoints merge': '--checkpoint={lora} --output={new}',
    'hf export': '--checkpoint={run} --output={new}',
    'hf export-adapter': '--checkpoint={lora} --output={new} --base=base',
    'hf export-gguf': '--checkpoint={run} --output={new}.gguf',
    'hf export-nanochat': '--checkpoint={nanochat} --output={new}',
}
OTHERS = {
    'configs list': 'lists configs',
    'configs show': 'prints a config',
    'prepare': 'writes data',
    'questions': 'writes prompts',
    'tokenizer': 'reads only the tokenizer',
    'fetch': 'copies files',
    'plan': 'compiles without parameters',
    'doctor': 'trains like train',
    'recipe': 'runs other commands',
    'monitor': 'shows metrics',
    'report': 'shows metrics',
    'supervise': 'runs other commands',
    'completion': 'prints a script',
    'checkpoints list': 'lists all steps',
    'checkpoints verify': 'verifies all steps',
    'checkpoints prune': 'deletes steps by rules',
    'hf import': 'writes a step',
}
# Uses of a checkpoint by the Python API. Each returns the step that was used.
API = {
    'load': lambda run, **step: maxlm.load(run, **step).step,
    'Model': lambda run, **step: maxlm.Model(run, **step).step,
    'Run': lambda run, **step: maxlm.Run(run).model(**step).step,
}
OTHER_NAMES = {
    'Config': 'describes a run',
    'Dataset': 'describes data',
    'Environment': 'is a type',
    'EnvironmentStep': 'is a type',
    'Plan': 'compiles without parameters',
    'StateCallback': 'observes a run',
    'Trainer': 'trains like maxlm train',
    'Trajectory': 'is a type',
    '__version__': 'a text',
    'init_state': 'makes parameters',
    'make_mesh': 'makes a mesh',
    'make_train_step': 'makes a function',
}


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    """Returns a function that makes runs in which only one step has parameters."""
    folder = tmp_path_factory.mktemp('runs')
    models = {
        'run': SETTINGS,
        'chat': {**SETTINGS, 'data__seq_len': 64},
        'lora': {**SETTINGS, 'model__lora_rank': 2},
        'nanochat': {**MODELS['nanochat'], **SIZES},
    }

    def make(step):
        for name, settings in models.items():
            workdir = folder / str(step) / name
            if not workdir.exists():
                _make_run(workdir, settings, step)
        return folder / str(step)

    return make


def _make_run(workdir, settings, with_parameters):
    changed = adapter_arrays(small_config(**settings).model) if 'model__lora_rank' in settings else {}
    tokenizer = chat_tokenizer() if workdir.name == 'chat' else None
    make_workdir(workdir, settings, step=with_parameters, tokenizer=tokenizer, changed=changed)
    if tokenizer:
        (workdir / CHAT_TEMPLATE).write_text(CHATML)
    steps = workdir / CHECKPOINTS_DIR
    for step, loss in LOSSES.items():
        if step != with_parameters:
            shutil.copytree(steps / str(with_parameters), steps / str(step))
            shutil.rmtree(steps / str(step) / 'params')
        progress = {'step': step, 'skipped': 0, 'validation_loss': loss}
        (steps / str(step) / 'progress' / 'metadata').write_text(json.dumps(progress))


@pytest.fixture
def call(runs, dataset, tmp_path, monkeypatch, capfd):
    """Returns a function that runs a command on runs whose step `has` has parameters: the exit code and the output."""
    monkeypatch.setattr(serve, 'serve_until_stopped', lambda running: EXIT_DONE)
    monkeypatch.delenv(HINTS)
    monkeypatch.setattr('sys.stdin', io.StringIO('Hi\n'))
    (tmp_path / 'prompts.jsonl').write_text('{"prompt": "ab", "target_length": 3}\n' * 8)

    def call(command, choice, *, has=NEWEST):
        listing._log_once.cache_clear()
        # pytest adds its handlers to loggers that do not propagate, as after an earlier command.
        listing.logger.handlers.clear()
        verb, *subcommand = command.split()
        folder = runs(has)
        names = {name: f'{folder / name}{choice}' for name in ('run', 'chat', 'lora', 'nanochat')}
        fields = {**names, 'data': dataset, 'prompts': tmp_path / 'prompts.jsonl', 'new': tmp_path / 'new'}
        words = USES[command].format(**fields).split()
        code = exit_code(module_of(verb).main, [*subcommand, *words])
        return code, ''.join(capfd.readouterr()), names

    return call


def commands_of(parser, name):
    """Yields the names of a command's subcommands, or its own name."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield name
    for action in below:
        for word, subparser in action.choices.items():
            yield from commands_of(subparser, f'{name} {word}')


def test_the_tables_name_all_commands():
    commands = [word for name in COMMANDS for word in commands_of(module_of(name).make_parser(), name)]
    assert sorted(commands) == sorted([*USES, *OTHERS])


def test_the_arguments_name_all_config_keys():
    """The keys of checkpoints are those of which `{run}` is the value."""
    type_of = declared_keys()['train.init_from'].path
    keys = {name for name, key in declared_keys().items() if key.path == type_of}
    named = re.findall(r'--config\.([a-z_.]+)=\{run\}(?: |$)', ' '.join(USES.values()))
    # A run with a reward model needs another model; see the next test.
    assert keys == {*named, REWARD_MODEL} == {'train.init_from', 'distill.teacher', REWARD_MODEL}


def test_a_reward_model_is_the_newest_step(runs, caplog, monkeypatch):
    run = runs(NEWEST) / 'run'
    # As in a command, whose console is the only handler.
    monkeypatch.setattr(listing.logger, 'handlers', [caplog.handler])
    monkeypatch.setattr(listing.logger, 'propagate', False)
    listing._log_once.cache_clear()
    with caplog.at_level(logging.INFO, 'maxlm'):
        frozen_checksum(str(run), key=REWARD_MODEL)
        frozen_checksum(f'{run}@best', key=REWARD_MODEL)
    assert caplog.text.count(USED['']) == 1
    assert caplog.text.count(USED['@best']) == 1


@pytest.mark.parametrize('command', USES)
def test_commands_use_the_newest_step(command, call):
    code, output, _ = call(command, '')
    assert (code, output.count(USED[''])) == (EXIT_DONE, 1), output


@pytest.mark.parametrize('command', USES)
def test_best_chooses_another_step(command, call, tmp_path):
    """Control: the other steps cannot be used, because they have no parameters; a copy has none either."""
    code, output, _ = call(command, '@best')
    copy = tmp_path / 'new' / CHECKPOINTS_DIR / str(BEST)
    assert copy.is_dir() if command == 'checkpoints fetch' else code != EXIT_DONE
    assert not (copy / 'params').exists()
    assert USED['@best'] in output


@pytest.mark.parametrize('command', ['evaluate', 'generate', 'hf export-adapter', 'checkpoints fetch'])
def test_the_next_line_repeats_the_choice(command, call, tmp_path):
    code, output, names = call(command, '@best', has=BEST)
    *_, line = output.splitlines()
    wanted = f'{tmp_path}/new@2' if command == 'checkpoints fetch' else names['lora' if 'adapter' in command else 'run']
    assert code == EXIT_DONE
    assert line.startswith('Next: maxlm ')
    assert wanted in line


def test_the_tables_name_the_api():
    assert sorted(maxlm.__all__) == sorted([*API, *OTHER_NAMES])
    methods = {name for name in vars(maxlm.Run) if callable(getattr(maxlm.Run, name)) and not name.startswith('_')}
    assert methods == {'model'}


@pytest.mark.parametrize('name', API)
def test_the_api_uses_the_newest_step(name, runs, caplog):
    run = runs(NEWEST) / 'run'
    listing._log_once.cache_clear()
    assert API[name](run) == NEWEST
    assert caplog.text.count(USED['']) == 1
    assert API[name](run, step=NEWEST) == NEWEST
    # Control: the other steps have no parameters.
    for step in (BEST, 'best'):
        with pytest.raises(InputError):
            API[name](run, step=step)
    assert API[name](runs(BEST) / 'run', step='best') == BEST


def test_a_loaded_model_keeps_its_step(runs, tmp_path):
    """A newer step, which a run saves after the model is loaded, is not exported."""
    run = shutil.copytree(runs(NEWEST) / 'run', tmp_path / 'run')
    model = maxlm.load(run)
    shutil.copytree(run / CHECKPOINTS_DIR / str(BEST), run / CHECKPOINTS_DIR / '8')
    model.save_pretrained(tmp_path / 'hf')
    with pytest.raises(InputError):
        maxlm.load(run)
