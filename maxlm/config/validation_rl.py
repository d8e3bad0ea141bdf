"""Validates and completes the config keys of post-training: LoRA, distillation, DPO, reward models and GRPO."""

from __future__ import annotations

import dataclasses
import math
import re
from fnmatch import fnmatchcase

from maxlm.config.schema import Config, DataConfig, ModelConfig
from maxlm.config.sections.optimizer import GuardConfig
from maxlm.config.sections.posttraining import GrpoConfig
from maxlm.config.user_function import is_function_name
from maxlm.errors import InputError
from maxlm.storage.json_text import parse_json


def check_adapters(model: ModelConfig) -> None:
    """Checks `model.lora_target_modules` against the projections of the model's blocks if LoRA is enabled.

    Raises:
        InputError: there are no patterns, or a pattern matches no projection.
    """
    if not model.lora_rank:
        return
    names = model.projections
    there = f'available: {", ".join(names)}'
    if not model.lora_target_modules:
        raise InputError(
            f'model.lora_target_modules=() with model.lora_rank={model.lora_rank}: set one or more patterns, e.g. '
            f"('*',); {there}"
        )
    for pattern in model.lora_target_modules:
        if not isinstance(pattern, str) or not any(fnmatchcase(name, pattern) for name in names):
            raise InputError(f'model.lora_target_modules: {pattern!r} matches no projection of a block; {there}')


def check_dpo(config: Config) -> None:
    """Checks that the keys of section dpo are consistent and, if the objective is dpo, that the data keys match it.

    Raises:
        InputError: some keys are inconsistent.
    """
    dpo, data = config.dpo, config.data
    if dpo.label_smoothing >= 0.5:
        raise InputError(
            f'dpo.label_smoothing={dpo.label_smoothing}: must be below 0.5, because at 0.5 or more most pairs would be '
            'reversed'
        )
    if dpo.label_smoothing and dpo.loss_type != 'sigmoid':
        raise InputError(
            f'dpo.label_smoothing={dpo.label_smoothing} has no effect with dpo.loss_type={dpo.loss_type}; set it to 0, '
            'or set dpo.loss_type=sigmoid'
        )
    if dpo.rpo_alpha and dpo.loss_type == 'orpo':
        raise InputError(
            f'dpo.rpo_alpha={dpo.rpo_alpha} with dpo.loss_type=orpo, which already contains the cross-entropy of the '
            'preferred answers; set dpo.rpo_alpha=0'
        )
    if dpo.rpo_alpha and dpo.takes_labels:
        raise InputError(
            f'dpo.rpo_alpha={dpo.rpo_alpha} has no effect with dpo.loss_type={dpo.loss_type}; set dpo.rpo_alpha=0'
        )
    for key in ('desirable_weight', 'undesirable_weight'):
        if (weight := getattr(dpo, key)) != 1 and not dpo.takes_labels:
            raise InputError(
                f'dpo.{key}={weight} has no effect with dpo.loss_type={dpo.loss_type}; set it to 1, or set '
                'dpo.loss_type=kto'
            )
    if config.train.objective == 'dpo':
        _check_pairs(data, 'dpo')


def _check_pairs(data: DataConfig, objective: str) -> None:
    if not data.document_mask:
        raise InputError(
            f'data.document_mask=False with train.objective={objective}: the responses of a pair would attend to each '
            'other; set data.document_mask=True'
        )
    if data.seq_len_schedule:
        raise InputError(
            f'data.seq_len_schedule={data.seq_len_schedule} with train.objective={objective}: shorter sequences would '
            'split the responses of a pair; set data.seq_len_schedule=()'
        )


def check_reward(config: Config) -> None:
    """Checks that a model with the head of a reward model is trained as one, and that other keys do not need tokens.

    Raises:
        InputError: some keys are inconsistent.
    """
    objective = config.train.objective
    if objective != 'reward':
        if config.model.reward_head:
            raise InputError(
                f'model.reward_head=True with train.objective={objective}: a reward model predicts no tokens; set '
                'model.reward_head=False, or train.objective=reward'
            )
        return
    _check_pairs(config.data, objective)
    for key, value in (('eval.sample_prompts', config.eval.sample_prompts), ('eval.tasks', config.eval.tasks)):
        if value:
            raise InputError(
                f'{key}={value!r} with train.objective=reward: a reward model generates no text; set {key}=()'
            )


def with_heads(config: Config) -> Config:
    """Returns the config of a run with the heads of its objective: that of a reward model, or the value head of PPO."""
    objective, model = config.train.objective, config.model
    reward_head = model.reward_head or objective == 'reward'
    value_head = objective == 'grpo' and config.grpo.advantage_estimator == 'gae'
    if (reward_head, value_head) == (model.reward_head, model.value_head):
        return config
    return dataclasses.replace(config, model=dataclasses.replace(model, reward_head=reward_head, value_head=value_head))


def check_trained(config: Config) -> None:
    """Checks the keys for frozen parameters, LoRA adapters and the reference model.

    Raises:
        InputError: some keys are inconsistent, or train.init_from is missing although the loss needs a reference model.
    """
    optimizer = config.optimizer
    for key in ('frozen_params', 'trainable_params'):
        patterns = getattr(optimizer, key)
        if not all(isinstance(pattern, str) and pattern for pattern in patterns):
            raise InputError(f"optimizer.{key}={patterns!r}: use patterns of parameter names, e.g. ('embedding',)")
    if (optimizer.frozen_params or config.model.lora_rank) and config.mesh.host_offload != 'none':
        key = 'optimizer.frozen_params' if optimizer.frozen_params else 'model.lora_rank'
        raise InputError(
            f'mesh.host_offload={config.mesh.host_offload} with {key}: frozen parameters have no optimizer state to '
            'offload; set mesh.host_offload=none'
        )
    check_qlora(config)
    if config.has_reference and not config.train.init_from:
        why = 'train.objective=dpo' if config.train.objective == 'dpo' else f'grpo.kl_coef={config.grpo.kl_coef:g}'
        raise InputError(
            f"{why} requires a reference model, but train.init_from is ''; set train.init_from to a checkpoint"
        )


def check_qlora(config: Config) -> None:
    """Checks that a model with quantized kernels has adapters to train and kernels to quantize.

    Raises:
        InputError: it has not, or other keys do not support quantized kernels.
    """
    model = config.model
    quantized = f'model.weight_quantization={model.weight_quantization}'
    if model.activation_quantization != 'none':
        raise InputError(
            f'model.activation_quantization={model.activation_quantization} is for inference; set it to none, and use '
            '--quantize=w8a8 with the commands that generate text'
        )
    if model.weight_quantization == 'float':
        return
    if not model.lora_rank:
        raise InputError(
            f'{quantized}: quantized weights cannot be trained; set model.lora_rank to train adapters, or set it to '
            'float, and quantize the trained checkpoint with `maxlm quantize`'
        )
    if not config.train.init_from:
        raise InputError(
            f"{quantized} requires kernels to quantize, but train.init_from is ''; set train.init_from to a checkpoint"
        )
    if model.matmul_precision != 'default':
        raise InputError(
            f'{quantized} with model.matmul_precision={model.matmul_precision}: quantized kernels are multiplied in '
            'model.dtype; set model.matmul_precision=default'
        )
    if model.mtp_depth:
        raise InputError(
            f'{quantized} with model.mtp_depth={model.mtp_depth}: modules of multi-token prediction are not '
            'quantized; set model.mtp_depth=0'
        )


def with_grpo_defaults(config: Config) -> Config:
    """Returns a config in which keys with their general default have the default of GRPO, if that is the objective.

    The loss of GRPO is no measure of progress, and its batches depend on the model, so there is no spike window and no
    rollback. A rollout has the fewest prompts whose responses fill complete batches.
    """
    if config.train.objective != 'grpo':
        return config
    guard, grpo, train = config.guard, config.grpo, config.train
    off = {key: 0 for key in ('spike_window', 'max_rollbacks') if getattr(guard, key) == getattr(GuardConfig, key)}
    rows = train.global_batch_size or train.global_batch_size_tokens // config.data.seq_len
    if rows and not grpo.prompts_per_rollout:
        prompts = math.lcm(rows, grpo.num_generations) // grpo.num_generations
        grpo = dataclasses.replace(grpo, prompts_per_rollout=prompts)
    return dataclasses.replace(config, guard=dataclasses.replace(guard, **off), grpo=grpo)


def check_grpo(config: Config) -> None:
    """Checks the config of a maxlm grpo run.

    Raises:
        InputError: a required key is missing, or some keys are inconsistent.
    """
    grpo, train, seq_len = config.grpo, config.train, config.data.seq_len
    if train.objective != 'grpo':
        raise InputError(
            f'train.objective={train.objective}: maxlm grpo requires train.objective=grpo; set it, or use maxlm train'
        )
    _check_environment(grpo)
    required = {
        'train.init_from': train.init_from,
        # An environment may have examples of its own.
        'grpo.prompts': grpo.prompts or grpo.environment,
        'grpo.max_completion_length': grpo.max_completion_length,
    }
    if missing := {key: value for key, value in required.items() if not value}:
        found = ', '.join(f'{key}={value!r}' for key, value in missing.items())
        values = 'a value' if len(missing) == 1 else 'values'
        raise InputError(f'{found}: maxlm grpo requires {values}; set {" and ".join(missing)}')
    if config.eval.interval and not (grpo.eval_prompts or grpo.environment):
        raise InputError(
            "grpo.eval_prompts='' with eval.interval: set grpo.eval_prompts to a file of prompts, or set "
            'eval.interval=0'
        )
    if grpo.importance_sampling_cap != GrpoConfig.importance_sampling_cap and not grpo.max_staleness:
        raise InputError(
            f'grpo.importance_sampling_cap={grpo.importance_sampling_cap:g} has no effect with '
            'grpo.max_staleness=0; set grpo.max_staleness=1 or remove the key'
        )
    if grpo.reward_processes and grpo.sandbox_functions:
        raise InputError(
            f'grpo.reward_processes={grpo.reward_processes} has no effect with grpo.sandbox_functions=True, whose '
            'sandbox runs one call for each core; remove the key'
        )
    if not grpo.tools and grpo.max_tool_calls != GrpoConfig.max_tool_calls:
        raise InputError(
            f'grpo.max_tool_calls={grpo.max_tool_calls} has no effect with grpo.tools=(); set grpo.tools or remove the '
            'key'
        )
    _check_estimator(grpo)
    if grpo.max_completion_length >= seq_len:
        raise InputError(
            f'grpo.max_completion_length={grpo.max_completion_length} leaves no tokens for a prompt in '
            f'data.seq_len={seq_len}; lower it'
        )
    for name in grpo.tools:
        if not isinstance(name, str) or not is_function_name(name):
            raise InputError(
                f"grpo.tools: {name!r} is not the name of a function; use 'package.module:function', e.g. "
                "('my_tools:calculate',)"
            )
    rows, global_batch = (
        grpo.prompts_per_rollout * grpo.num_generations,
        train.global_batch_size or train.global_batch_size_tokens // seq_len,
    )
    if rows % global_batch:
        raise InputError(
            f'grpo.prompts_per_rollout · grpo.num_generations = {rows} responses are not a multiple of '
            'train.global_batch_size='
            f'{global_batch}; nearest: {max(1, round(rows / global_batch)) * global_batch}'
        )
    for key, value, expected in (
        ('train.hours', train.hours, 0),
        ('train.dollars', train.dollars, 0),
        ('train.num_tokens', train.num_tokens, 0),
        ('guard.spike_window', config.guard.spike_window, 0),
        ('guard.max_rollbacks', config.guard.max_rollbacks, 0),
        ('data.seq_len_schedule', config.data.seq_len_schedule, ()),
        ('data.sources_schedule', config.data.sources_schedule, ()),
        ('data.rows', config.data.rows, 'stream'),
        ('data.document_mask', config.data.document_mask, True),
        ('mesh.host_offload', config.mesh.host_offload, 'none'),
    ):
        if value != expected:
            raise InputError(
                f'{key}={value!r}: not supported by maxlm grpo; set it to {expected!r}{_WHY_NOT.get(key, "")}'
            )


def _check_estimator(grpo: GrpoConfig) -> None:
    """Checks the keys of advantages, losses and dynamic sampling, which depend on each other."""
    estimator = f'grpo.advantage_estimator={grpo.advantage_estimator}'
    for keys, is_used, why in (
        (('gamma', 'lam', 'vf_coef', 'cliprange_value'), grpo.advantage_estimator == 'gae', estimator),
        (('scale_rewards',), grpo.advantage_estimator == 'grpo', estimator),
        (('epsilon',), grpo.loss_type != 'cispo', 'grpo.loss_type=cispo'),
        (('kl_estimator', 'kl_in_reward'), grpo.kl_coef > 0, 'grpo.kl_coef=0'),
    ):
        for key in keys:
            if not is_used and (value := getattr(grpo, key)) != getattr(GrpoConfig, key):
                raise InputError(f'grpo.{key}={value} has no effect with {why}; remove the key')
    if grpo.num_generations == 1 and grpo.advantage_estimator != 'gae':
        raise InputError(
            f'grpo.num_generations=1 with {estimator}: the advantage of a single response is always 0; set '
            'grpo.num_generations=2 or more, or grpo.advantage_estimator=gae'
        )
    if grpo.loss_type == 'cispo' and grpo.epsilon_high < 1:
        raise InputError(
            f'grpo.epsilon_high={grpo.epsilon_high:g} with grpo.loss_type=cispo: it is the largest ratio itself; set '
            'it to 1 or more, e.g. 5'
        )
    if grpo.max_num_gen_batches > 1:
        for key, value, expected in (
            ('max_staleness', grpo.max_staleness, 0),
            ('advantage_estimator', grpo.advantage_estimator == 'gae' and 'gae', False),
        ):
            if value != expected:
                raise InputError(
                    f'grpo.max_num_gen_batches={grpo.max_num_gen_batches} with grpo.{key}={value}: not supported by '
                    'dynamic sampling; set grpo.max_num_gen_batches=1'
                )


def _check_environment(grpo: GrpoConfig) -> None:
    name, default = grpo.environment, GrpoConfig()
    if not name:
        for key in ('environment_args', 'environment_timeout', 'max_turns'):
            if (value := getattr(grpo, key)) != getattr(default, key):
                raise InputError(
                    f"grpo.{key}={value!r} has no effect with grpo.environment=''; set grpo.environment or remove the "
                    'key'
                )
        return
    if not is_function_name(name) and not re.fullmatch(r'verifiers:[\w./-]+', name):
        raise InputError(
            f'grpo.environment={name!r} is not the name of a class; use package.module:Class, e.g. '
            'my_environments:GuessNumber, or verifiers:NAME'
        )
    try:
        is_object = isinstance(parse_json(grpo.environment_args or '{}'), dict)
    except ValueError:
        is_object = False
    if not is_object:
        raise InputError(
            f'grpo.environment_args={grpo.environment_args[:80]!r}: must be a JSON object, e.g. \'{{"high": 100}}\''
        )
    # The environment has rewards and tools of its own, and its methods run in the training process.
    owned = (
        'reward',
        'reward_model',
        'eval_reward',
        'soft_punish_cache',
        'tools',
        'max_tool_calls',
        'sandbox_functions',
        'reward_processes',
    )
    for key in owned:
        if (value := getattr(grpo, key)) != getattr(default, key):
            raise InputError(
                f'grpo.{key}={value!r} has no effect with grpo.environment={name}; remove it, or set '
                "grpo.environment=''"
            )


# Reasons why a key must not have its default or another value, appended to the error message.
_WHY_NOT = {
    'guard.spike_window': ' (the loss is no measure of progress, because rewards are relative to the same rollout)',
    'guard.max_rollbacks': ' (batches depend on the model, so they cannot be skipped)',
    'train.hours': ', and set train.num_steps or train.num_epochs instead',
    'train.dollars': ', and set train.num_steps or train.num_epochs instead',
    'train.num_tokens': ', and set train.num_steps or train.num_epochs instead',
}


def check_distill(config: Config) -> None:
    """Checks that the loss is the cross-entropy, to which distillation adds a term, if there is a teacher.

    Raises:
        InputError: the run has another loss, or two teachers, or data that stored logits do not fit.
    """
    distill, train, data = config.distill, config.train, config.data
    key = 'distill.teacher' if distill.teacher else 'distill.logits_dir'
    name = f'{key}={distill.teacher or distill.logits_dir}'
    if not (distill.teacher or distill.logits_dir):
        return
    if train.objective != 'next_token':
        raise InputError(
            f'{name} with train.objective={train.objective}: only next_token can be distilled; set '
            f"train.objective=next_token, or {key}=''"
        )
    if train.loss:
        raise InputError(
            f'{name} with train.loss={train.loss}: distillation is a part of the cross-entropy loss; set '
            f"train.loss='', or {key}=''"
        )
    if not distill.logits_dir:
        return
    if distill.teacher:
        raise InputError(f'{name} with distill.logits_dir={distill.logits_dir}: set only one of them')
    for other, value in (('data.sources', data.sources), ('data.seq_len_schedule', data.seq_len_schedule)):
        if value:
            raise InputError(
                f'{other}={value!r} with {name}: stored logits are those of the windows of data.path; set {other}=()'
            )
    if data.rows != 'stream':
        raise InputError(
            f'data.rows={data.rows} with {name}: stored logits are those of the windows of the stream; set '
            'data.rows=stream, or use distill.teacher'
        )
