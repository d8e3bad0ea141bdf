"""Config keys that contain paths, and the URL schemes that each key accepts."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import Any

from maxlm.config.schema import Config
from maxlm.storage.paths import ANY, BUCKETS, Kind, PathOption, check_key

_ADVICE = 'fetch it with `maxlm checkpoints fetch` and give the directory'
PATHS = MappingProxyType(
    {
        'data.path': PathOption(Kind.DIRECTORY, ANY),
        'data.tokenizer': PathOption(may_be_empty=True),
        'data.cache_dir': PathOption(Kind.DIRECTORY),
        'train.init_from': PathOption(Kind.DIRECTORY, ('gs',), may_be_empty=True, advice=_ADVICE),
        'distill.teacher': PathOption(Kind.DIRECTORY, ('gs',), may_be_empty=True, advice=_ADVICE),
        'distill.logits_dir': PathOption(Kind.DIRECTORY, may_be_empty=True),
        'train.compilation_cache_dir': PathOption(Kind.EITHER, may_be_empty=True),
        'checkpoint.remote_dir': PathOption(urls=ANY, may_be_empty=True),
        'export.to': PathOption(Kind.DIRECTORY, BUCKETS, may_be_empty=True),
        'grpo.prompts': PathOption(Kind.FILE, ANY, may_be_empty=True),
        'grpo.eval_prompts': PathOption(Kind.FILE, ANY, may_be_empty=True),
        'alerts.file': PathOption(Kind.FILE, may_be_empty=True),
    }
)
# `~` is expanded at use, so that config.json also works for other users.
EXPANDED_AT_USE = ('data.cache_dir', 'train.compilation_cache_dir', 'alerts.file')
# An entry of data.sources is a directory, optionally followed by `#SOURCE`. Task names may be paths.
SOURCE = PathOption(urls=ANY)
TASK = PathOption()


def check_paths(config: Config) -> Config:
    """Returns the config with `~` expanded in paths, and `file://` removed from keys that accept no other URLs.

    Raises:
        InputError: a path or URL is invalid regardless of the other keys. The message names the key.
    """
    sections: dict[str, Any] = {}
    for key, option in PATHS.items():
        section, _, name = key.partition('.')
        before = sections.get(section, getattr(config, section))
        given = getattr(before, name)
        path = check_key(key, given, option)
        # A dataset at file:// is fetched like a dataset in a bucket.
        as_given = (option.urls == ANY and given.startswith('file://')) or (
            key in EXPANDED_AT_USE and given.startswith('~')
        )
        sections[section] = dataclasses.replace(before, **{name: given if as_given else path})
    config = dataclasses.replace(config, **sections)
    for source, _ in config.data.sources:
        check_key('data.sources', source, SOURCE)
    for task in config.eval.tasks:
        check_key('eval.tasks', task, TASK)
    return config
