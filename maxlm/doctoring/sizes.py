"""How large a checkpoint of a run will be, before anything of the run is known but its config."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from maxlm.config.keys import AUTO, Config, MeshConfig
from maxlm.data.storage import is_url
from maxlm.errors import InputError

# Where neither config nor data set tells: that of GPT-2.
USUAL_VOCABULARY = 50_257


def checkpoint_bytes(config: Config | None) -> int | None:
    """Bytes of parameters, average and optimizer state over all devices; None without a config that fits together."""
    if config is None:
        return None
    # JAX comes with these; a machine is looked at without them too.
    from maxlm.config.resolve import resolve
    from maxlm.data.records import load_manifest
    from maxlm.planning.state_bytes import planned_state_bytes

    vocabulary = config.model.vocab_size
    path = config.data.sources[0][0].partition('#')[0] if config.data.sources else config.data.path
    if not vocabulary and not is_url(path):
        try:
            vocabulary = load_manifest(Path(path), complete=False).vocab_size
        except InputError:
            # The check of the data says so.
            vocabulary = 0
    # The size of the whole does not depend on where its parts are.
    whole = dataclasses.replace(
        config,
        mesh=MeshConfig(fsdp=1),
        model=dataclasses.replace(config.model, attention='auto'),
        train=dataclasses.replace(
            config.train, micro_batch=0 if config.train.micro_batch == AUTO else config.train.micro_batch
        ),
    )
    try:
        resolved = resolve(whole, platform='cpu', num_devices=1, vocab_size=vocabulary or USUAL_VOCABULARY, windows=1)
    except InputError:
        return None
    return sum(planned_state_bytes(resolved))
