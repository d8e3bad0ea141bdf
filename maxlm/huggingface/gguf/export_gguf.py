"""Exports a checkpoint to one GGUF file for llama.cpp, one tensor at a time.

Names of keys and tensors come from the library gguf, and the differences between architectures from `architectures`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from maxlm.checkpoint.conversion.merge_lora import open_parameters
from maxlm.checkpoint.fetch import find_local_step
from maxlm.config.schema import ModelConfig
from maxlm.errors import InputError, os_message
from maxlm.huggingface.architectures.reward_models import check_language_model
from maxlm.huggingface.config_conversion import choose_architecture
from maxlm.huggingface.export_model import check_shapes
from maxlm.huggingface.gguf.architectures import frequency_factors, gguf_architecture
from maxlm.huggingface.gguf.library import load_gguf
from maxlm.huggingface.gguf.tensors import GgufTensor, gguf_tensors
from maxlm.huggingface.gguf.vocabulary import vocabulary
from maxlm.huggingface.state_dict import parameter_shapes, tensors
from maxlm.huggingface.tokenizer_files import TextFiles, files_for_export
from maxlm.log import progress_bar
from maxlm.storage.atomic import check_space, new_file
from maxlm.workdir.files import CHAT_TEMPLATE, CONFIG, TOKENIZER, read_config

# Number of values of a row that share a scale in q8_0.
BLOCK = 32


class ExportedGguf(NamedTuple):
    """Summary of an export. `float16_tensors` are matrices whose rows cannot be divided into blocks."""

    path: Path
    kind: str
    parameters: int
    bytes: int
    float16_tensors: tuple[str, ...]


def export_gguf(checkpoint: str, output: str, *, dtype: str, show: bool) -> ExportedGguf:
    """Writes a checkpoint with its tokenizer and chat template as one file. Vectors and routers are stored in float32.

    Args:
        checkpoint: path as accepted by `find_local_step`.
        output: path of the new file.
        dtype: type of matrices: f16, f32 or q8_0 (8 bits, with a scale for every 32 values of a row).
        show: whether to show progress.

    Raises:
        InputError: GGUF does not support the model or the tokenizer, the checkpoint cannot be read, a value is not
            finite or exceeds float16, the output cannot be written, or gguf is not installed. No file remains.
    """
    gguf = load_gguf()
    path = _check_new_file(output)
    step_directory = find_local_step(checkpoint)
    workdir = Path(step_directory.parent.parent)
    model = read_config(workdir).model
    check_language_model(model, 'GGUF')
    architecture = choose_architecture(model).model_type
    target = gguf_architecture(model, architecture, str(workdir / CONFIG))
    hf_tensors = tensors(architecture, model)
    reader = open_parameters(step_directory, model)
    check_shapes(reader.shapes, parameter_shapes(hf_tensors), step_directory, workdir / CONFIG)
    kind = target.kind
    names = gguf.get_tensor_name_map(next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == kind), model.num_layers)
    rows = gguf_tensors(hf_tensors, model, target, names)
    types = {tensor.name: _type_of(tensor, dtype, gguf) for tensor in rows}
    sizes = {tensor.name: _bytes(tensor.shape, types[tensor.name], gguf) for tensor in rows}
    check_space('--output', path, sum(sizes.values()))
    with (
        _new_file(path) as partial,
        progress_bar('export', total=len(rows), unit='tensor', show=show) as bar,
        contextlib.closing(gguf.GGUFWriter(partial, kind)) as writer,
    ):
        _add_metadata(writer, model, path.stem, dtype, gguf)
        target.add_metadata(writer, model)
        _add_tokenizer(writer, files_for_export(workdir, model), model, str(workdir / TOKENIZER))
        factors = frequency_factors(model)
        for name, values in factors.items():
            writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
        for tensor in rows:
            float32 = np.dtype(np.float32)
            writer.add_tensor_info(tensor.name, tensor.shape, float32, sizes[tensor.name], raw_dtype=types[tensor.name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for values in factors.values():
            writer.write_tensor_data(values)
        for tensor in rows:
            values = tensor.convert([reader.read(source, tensor.layer) for source in tensor.sources])
            writer.write_tensor_data(_encode(tensor.hf_name, values, types[tensor.name], gguf))
            bar.update()
    quantized_type = gguf.GGMLQuantizationType.Q8_0
    float16_tensors = tuple(
        tensor.hf_name
        for tensor in rows
        if dtype == 'q8_0' and not tensor.is_float32 and types[tensor.name] != quantized_type
    )
    parameters = sum(math.prod(tensor.shape) for tensor in rows)
    return ExportedGguf(path, kind, parameters, path.stat().st_size, float16_tensors)


def _check_new_file(output: str) -> Path:
    path = Path(output).expanduser().resolve()
    if path.exists():
        raise InputError(f'--output={output}: path already exists; choose a new file')
    if not path.parent.is_dir():
        raise InputError(f'--output={output}: {path.parent} is not a directory; create it, or choose another path')
    return path


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[Path]:
    """Yields a temporary file that becomes `path`; raises InputError if it cannot be written."""
    try:
        with new_file(path) as partial:
            yield partial
    except OSError as error:
        raise InputError(f'--output={path}: {os_message(error)}; choose a writable path') from error


def _add_metadata(writer: Any, model: ModelConfig, name: str, dtype: str, gguf: Any) -> None:
    kinds = gguf.LlamaFileType
    file_types = {'f16': kinds.MOSTLY_F16, 'f32': kinds.ALL_F32, 'q8_0': kinds.MOSTLY_Q8_0}
    writer.add_name(name)
    writer.add_file_type(file_types[dtype])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(model.vocab_size)
    writer.add_context_length(model.max_positions)
    writer.add_embedding_length(model.dim)
    writer.add_block_count(model.num_layers)
    # Without dense layers, some architectures read the width of an expert from this key.
    has_dense_layers = model.num_dense_layers or not model.num_experts
    writer.add_feed_forward_length(model.ffn_dim if has_dense_layers else model.expert_ffn_dim)
    writer.add_head_count(model.num_heads)
    if model.kv_lora_rank:
        # All heads use the same latent, so llama.cpp computes multi-query attention.
        writer.add_head_count_kv(1)
        writer.add_key_length(model.kv_lora_rank + model.qk_rope_head_dim)
        writer.add_value_length(model.kv_lora_rank)
        writer.add_rope_dimension_count(model.qk_rope_head_dim)
    else:
        writer.add_head_count_kv(model.num_kv_heads)
        writer.add_key_length(model.head_dim)
        writer.add_value_length(model.head_dim)
        writer.add_rope_dimension_count(round(model.partial_rotary_factor * model.head_dim))
    add_epsilon = writer.add_layer_norm_eps if model.norm == 'layernorm' else writer.add_layer_norm_rms_eps
    add_epsilon(model.norm_epsilon)
    writer.add_rope_freq_base(model.rope_theta)
    # llama3 and longrope scaling is written as tensors.
    kinds = {'linear': gguf.RopeScalingType.LINEAR, 'yarn': gguf.RopeScalingType.YARN}
    if model.rope_scaling in kinds:
        writer.add_rope_scaling_type(kinds[model.rope_scaling])
        writer.add_rope_scaling_factor(model.rope_scaling_factor)
        writer.add_rope_scaling_orig_ctx_len(model.original_max_positions)


def _add_tokenizer(writer: Any, text: TextFiles, model: ModelConfig, source: str) -> None:
    if TOKENIZER not in text.files:
        raise InputError(
            f'{source}: file not found, but a GGUF file requires a tokenizer; copy its tokenizer.json there'
        )
    vocab = vocabulary(text.files[TOKENIZER].decode(), model.vocab_size, source)
    writer.add_tokenizer_model(vocab.model)
    writer.add_tokenizer_pre(vocab.split)
    writer.add_token_list(vocab.tokens)
    writer.add_token_types(vocab.types)
    if vocab.unknown_id is None:
        writer.add_token_merges(vocab.merges)
    else:
        writer.add_token_scores(vocab.scores)
        writer.add_add_space_prefix(vocab.add_space)
        writer.add_unk_token_id(vocab.unknown_id)
    beginning = () if text.boundaries is None else text.boundaries.beginning
    if len(beginning) > 1:
        raise InputError(
            f'{source}: texts begin with {len(beginning)} tokens, but GGUF supports only one; export the model for '
            'Transformers instead'
        )
    writer.add_add_bos_token(bool(beginning))
    eos_ids = text.ids['eos_token_id']
    eos_ids = eos_ids if isinstance(eos_ids, list) else [] if eos_ids is None else [eos_ids]
    # The format cannot represent a token that does not exist.
    eos_ids = [eos_id for eos_id in eos_ids if eos_id >= 0]
    bos_id = beginning[0] if beginning else text.ids['bos_token_id']
    if bos_id is not None and bos_id >= 0:
        writer.add_bos_token_id(bos_id)
    # llama.cpp ends a text at each of the three.
    adders = (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)
    for add, eos_id in zip(adders, eos_ids, strict=False):
        add(eos_id)
    if CHAT_TEMPLATE in text.files:
        writer.add_chat_template(text.files[CHAT_TEMPLATE].decode())


def _type_of(tensor: GgufTensor, dtype: str, gguf: Any) -> Any:
    types = gguf.GGMLQuantizationType
    if tensor.is_float32 or dtype == 'f32':
        return types.F32
    return types.Q8_0 if dtype == 'q8_0' and tensor.shape[-1] % BLOCK == 0 else types.F16


def _bytes(shape: tuple[int, ...], kind: Any, gguf: Any) -> int:
    values, size = gguf.GGML_QUANT_SIZES[kind]
    return math.prod(shape) // int(values) * int(size)


def _encode(name: str, values: np.ndarray, kind: Any, gguf: Any) -> np.ndarray:
    # The scales of blocks are float16 too.
    dtype = 'float32' if kind == gguf.GGMLQuantizationType.F32 else 'float16'
    if not np.abs(values).max() <= np.finfo(dtype).max:
        raise InputError(f'{name}: a value is not finite or is outside the range of {dtype}; export another step')
    encoded: np.ndarray = gguf.quants.quantize(np.ascontiguousarray(values, np.float32), kind)
    return encoded
