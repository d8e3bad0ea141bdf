"""Which values make sense for what comes after pretraining."""

from __future__ import annotations

from fnmatch import fnmatchcase

from maxlm.config.lora_targets import projections
from maxlm.config.schema import Config, ModelConfig
from maxlm.errors import InputError


def check_adapters(model: ModelConfig) -> None:
    """Compares `model.lora_targets` with the projections of the model's blocks, where there are to be adapters.

    Raises:
        InputError: there are no patterns, or one names none of them.
    """
    if not model.lora_rank:
        return
    names = projections(model)
    there = f'there are: {", ".join(names)}'
    if not model.lora_targets:
        raise InputError(
            f"model.lora_targets=() with model.lora_rank={model.lora_rank}: needs patterns, e.g. ('*',); {there}"
        )
    for pattern in model.lora_targets:
        if not isinstance(pattern, str) or not any(fnmatchcase(name, pattern) for name in names):
            raise InputError(f'model.lora_targets: {pattern!r} names no projection of a block; {there}')


def check_dpo(config: Config) -> None:
    """Compares the keys of section dpo with each other and, where preferences are learned, with those of the data.

    Raises:
        InputError: some do not go together.
    """
    dpo, data = config.dpo, config.data
    if dpo.label_smoothing >= 0.5:
        raise InputError(
            f'dpo.label_smoothing={dpo.label_smoothing}: must be below 0.5, from which on most pairs would be the '
            'wrong way round'
        )
    if dpo.label_smoothing and dpo.loss == 'ipo':
        raise InputError(
            f'dpo.label_smoothing={dpo.label_smoothing} with dpo.loss=ipo, which has none; set it to 0, or dpo.loss to '
            'sigmoid'
        )
    if config.train.objective != 'dpo':
        return
    if not data.isolate_documents:
        raise InputError(
            'data.isolate_documents=False with train.objective=dpo: the answers of a pair would see each other; set it '
            'to True'
        )
    if data.context_schedule:
        raise InputError(
            f'data.context_schedule={data.context_schedule} with train.objective=dpo: shorter windows would part the '
            'answers of a pair; set it to ()'
        )


def check_trained(config: Config) -> None:
    """Refuses what does not go with parameters that are not trained, and a reference that is nowhere.

    Raises:
        InputError: some keys do not go together.
    """
    optimizer = config.optimizer
    for key in ('frozen', 'trained'):
        patterns = getattr(optimizer, key)
        if not all(isinstance(pattern, str) and pattern for pattern in patterns):
            raise InputError(f"optimizer.{key}={patterns!r}: needs patterns of parameters' names, e.g. ('embedding',)")
    if (optimizer.frozen or config.model.lora_rank) and config.mesh.offload != 'none':
        key = 'optimizer.frozen' if optimizer.frozen else 'model.lora_rank'
        raise InputError(
            f'mesh.offload={config.mesh.offload} with {key}: what is not trained has no optimizer state to bring '
            f'elsewhere; set mesh.offload=none'
        )
    if config.has_reference and not config.train.init_from:
        why = 'train.objective=dpo' if config.train.objective == 'dpo' else f'grpo.kl_weight={config.grpo.kl_weight:g}'
        raise InputError(
            f"{why} ties the model to the one that it starts from, and train.init_from is ''; set it to a checkpoint"
        )


def check_grpo(config: Config) -> None:
    """Compares the keys of a run of maxlm.grpo.

    Raises:
        InputError: one is missing, or some do not go together.
    """
    grpo, train, window = config.grpo, config.train, config.data.window
    if train.objective != 'grpo':
        raise InputError(
            f'train.objective={train.objective}: maxlm.grpo learns from rewards; set it to grpo, or use maxlm.train'
        )
    for key, value in {
        'train.init_from': train.init_from,
        'grpo.prompts': grpo.prompts,
        'grpo.prompts_per_rollout': grpo.prompts_per_rollout,
        'grpo.max_tokens': grpo.max_tokens,
    }.items():
        if not value:
            raise InputError(f'{key}={value!r}: maxlm.grpo needs it')
    if config.eval.every and not grpo.eval_prompts:
        raise InputError("grpo.eval_prompts='' with eval.every: needs a file of prompts, or eval.every=0")
    if grpo.max_tokens >= window:
        raise InputError(
            f'grpo.max_tokens={grpo.max_tokens} leaves no room for a prompt in data.window={window}; lower it'
        )
    rows, global_batch = (
        grpo.prompts_per_rollout * grpo.samples,
        train.global_batch or train.global_batch_tokens // window,
    )
    if rows % global_batch:
        raise InputError(
            f'grpo.prompts_per_rollout · grpo.samples = {rows} responses are not a multiple of train.global_batch='
            f'{global_batch}; nearest: {max(1, round(rows / global_batch)) * global_batch}'
        )
    for key, value, wanted in (
        ('train.hours', train.hours, 0),
        ('train.dollars', train.dollars, 0),
        ('train.num_tokens', train.num_tokens, 0),
        ('guard.window', config.guard.window, 0),
        ('guard.max_rollbacks', config.guard.max_rollbacks, 0),
        ('data.context_schedule', config.data.context_schedule, ()),
        ('data.isolate_documents', config.data.isolate_documents, True),
        ('mesh.offload', config.mesh.offload, 'none'),
    ):
        if value != wanted:
            raise InputError(f'{key}={value!r}: maxlm.grpo does without; set it to {wanted!r}{_WHY_NOT.get(key, "")}')


# Why a key that has another default must be set.
_WHY_NOT = {
    'guard.window': ' (the loss of a step says little: rewards are relative to those of the same rollout)',
    'guard.max_rollbacks': ' (the batches behind a step depend on the model, so none could be left out)',
    'train.hours': ', and train.num_steps or train.num_epochs instead',
    'train.dollars': ', and train.num_steps or train.num_epochs instead',
    'train.num_tokens': ', and train.num_steps or train.num_epochs instead',
}
