"""Validates the config keys of fine-tuning and post-training: LoRA, frozen parameters, DPO and GRPO."""

from __future__ import annotations

from fnmatch import fnmatchcase

from maxlm.config.lora_targets import projections
from maxlm.config.schema import Config, ModelConfig
from maxlm.errors import InputError


def check_adapters(model: ModelConfig) -> None:
    """Checks `model.lora_target_modules` against the projections of the model's blocks if LoRA is enabled.

    Raises:
        InputError: there are no patterns, or a pattern matches no projection.
    """
    if not model.lora_rank:
        return
    names = projections(model)
    there = f'there are: {", ".join(names)}'
    if not model.lora_target_modules:
        raise InputError(
            f"model.lora_target_modules=() with model.lora_rank={model.lora_rank}: needs patterns, e.g. ('*',); {there}"
        )
    for pattern in model.lora_target_modules:
        if not isinstance(pattern, str) or not any(fnmatchcase(name, pattern) for name in names):
            raise InputError(f'model.lora_target_modules: {pattern!r} names no projection of a block; {there}')


def check_dpo(config: Config) -> None:
    """Checks that the keys of section dpo are consistent and, if the objective is dpo, that the data keys match it.

    Raises:
        InputError: some keys are inconsistent.
    """
    dpo, data = config.dpo, config.data
    if dpo.label_smoothing >= 0.5:
        raise InputError(
            f'dpo.label_smoothing={dpo.label_smoothing}: must be below 0.5, from which on most pairs would be the '
            'wrong way round'
        )
    if dpo.label_smoothing and dpo.loss_type == 'ipo':
        raise InputError(
            f'dpo.label_smoothing={dpo.label_smoothing} with dpo.loss_type=ipo, which has none; set it to 0, or '
            'dpo.loss_type to '
            'sigmoid'
        )
    if config.train.objective != 'dpo':
        return
    if not data.document_mask:
        raise InputError(
            'data.document_mask=False with train.objective=dpo: the answers of a pair would see each other; set it '
            'to True'
        )
    if data.seq_len_schedule:
        raise InputError(
            f'data.seq_len_schedule={data.seq_len_schedule} with train.objective=dpo: shorter windows would part the '
            'answers of a pair; set it to ()'
        )


def check_trained(config: Config) -> None:
    """Checks the keys for frozen parameters, LoRA adapters and the reference model.

    Raises:
        InputError: some keys are inconsistent, or train.init_from is missing although the loss needs a reference model.
    """
    optimizer = config.optimizer
    for key in ('frozen_params', 'trainable_params'):
        patterns = getattr(optimizer, key)
        if not all(isinstance(pattern, str) and pattern for pattern in patterns):
            raise InputError(f"optimizer.{key}={patterns!r}: needs patterns of parameters' names, e.g. ('embedding',)")
    if (optimizer.frozen_params or config.model.lora_rank) and config.mesh.host_offload != 'none':
        key = 'optimizer.frozen_params' if optimizer.frozen_params else 'model.lora_rank'
        raise InputError(
            f'mesh.host_offload={config.mesh.host_offload} with {key}: what is not trained has no optimizer '
            'state to bring '
            f'elsewhere; set mesh.host_offload=none'
        )
    if config.has_reference and not config.train.init_from:
        why = 'train.objective=dpo' if config.train.objective == 'dpo' else f'grpo.kl_coef={config.grpo.kl_coef:g}'
        raise InputError(
            f"{why} ties the model to the one that it starts from, and train.init_from is ''; set it to a checkpoint"
        )


def check_grpo(config: Config) -> None:
    """Checks the config of a maxlm.grpo run.

    Raises:
        InputError: a required key is missing, or some keys are inconsistent.
    """
    grpo, train, window = config.grpo, config.train, config.data.seq_len
    if train.objective != 'grpo':
        raise InputError(
            f'train.objective={train.objective}: maxlm.grpo learns from rewards; set it to grpo, or use maxlm.train'
        )
    for key, value in {
        'train.init_from': train.init_from,
        'grpo.prompts': grpo.prompts,
        'grpo.prompts_per_rollout': grpo.prompts_per_rollout,
        'grpo.max_completion_length': grpo.max_completion_length,
    }.items():
        if not value:
            raise InputError(f'{key}={value!r}: maxlm.grpo needs it')
    if config.eval.interval and not grpo.eval_prompts:
        raise InputError("grpo.eval_prompts='' with eval.interval: needs a file of prompts, or eval.interval=0")
    if grpo.max_completion_length >= window:
        raise InputError(
            f'grpo.max_completion_length={grpo.max_completion_length} leaves no room for a prompt in '
            f'data.seq_len={window}; lower it'
        )
    rows, global_batch = (
        grpo.prompts_per_rollout * grpo.num_generations,
        train.global_batch_size or train.global_batch_size_tokens // window,
    )
    if rows % global_batch:
        raise InputError(
            f'grpo.prompts_per_rollout · grpo.num_generations = {rows} responses are not a multiple of '
            'train.global_batch_size='
            f'{global_batch}; nearest: {max(1, round(rows / global_batch)) * global_batch}'
        )
    for key, value, wanted in (
        ('train.hours', train.hours, 0),
        ('train.dollars', train.dollars, 0),
        ('train.num_tokens', train.num_tokens, 0),
        ('guard.spike_window', config.guard.spike_window, 0),
        ('guard.max_rollbacks', config.guard.max_rollbacks, 0),
        ('data.seq_len_schedule', config.data.seq_len_schedule, ()),
        ('data.document_mask', config.data.document_mask, True),
        ('mesh.host_offload', config.mesh.host_offload, 'none'),
    ):
        if value != wanted:
            raise InputError(f'{key}={value!r}: maxlm.grpo does without; set it to {wanted!r}{_WHY_NOT.get(key, "")}')


# Reasons why a key must not have its default or another value, appended to the error message.
_WHY_NOT = {
    'guard.spike_window': ' (the loss of a step says little: rewards are relative to those of the same rollout)',
    'guard.max_rollbacks': ' (the batches behind a step depend on the model, so none could be left out)',
    'train.hours': ', and train.num_steps or train.num_epochs instead',
    'train.dollars': ', and train.num_steps or train.num_epochs instead',
    'train.num_tokens': ', and train.num_steps or train.num_epochs instead',
}
