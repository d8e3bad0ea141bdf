"""Writes workdirs with given parameters."""

import jax

from maxlm.checkpoint.streaming import StreamedArray, write_step
from maxlm.config.serialization import to_json
from maxlm.data.tokenizer.tokenizer import bytes_tokenizer
from maxlm.model.blocks import is_stacked
from maxlm.workdir.files import CONFIG, TOKENIZER


def write(workdir, config, params, step=150):
    """Writes a workdir with one step and a tokenizer of bytes."""
    workdir.mkdir()
    (workdir / CONFIG).write_text(to_json(config))
    bytes_tokenizer().save(workdir / TOKENIZER)
    arrays = {'.'.join(key.key for key in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}

    def streamed(path, values):
        return StreamedArray(values.shape, lambda layer: values if layer is None else values[layer], is_stacked(path))

    write_step(workdir, step, {path: streamed(path, values) for path, values in arrays.items()})
