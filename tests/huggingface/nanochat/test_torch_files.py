"""Files of PyTorch are read and written without it: equal values, and one line for damaged and hostile files."""

import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict

import ml_dtypes
import numpy as np
import pytest
import torch

from maxlm.errors import InputError
from maxlm.huggingface.nanochat import torch_reader
from maxlm.huggingface.nanochat.torch_reader import TorchTensors
from maxlm.huggingface.nanochat.torch_writer import write_torch_file
from maxlm.huggingface.tensors.safetensors_io import TensorEntry

RNG = np.random.default_rng(5)


def tensors(dtype=torch.float32):
    shapes = {'matrix': (3, 5), 'row': (1, 4), 'vector': (7,), 'scalar': ()}
    return {name: torch.from_numpy(RNG.standard_normal(shape)).to(dtype) for name, shape in shapes.items()}


def saved(tmp_path, value):
    torch.save(value, tmp_path / 'model.pt')
    return tmp_path / 'model.pt'


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
def test_values_of_torch_save(tmp_path, dtype):
    expected = tensors(dtype)
    files = TorchTensors(saved(tmp_path, expected))
    assert files.shapes == {name: tuple(tensor.shape) for name, tensor in expected.items()}
    assert {files.dtypes[name].name for name in expected} == {str(dtype).removeprefix('torch.')}
    for name, tensor in expected.items():
        np.testing.assert_array_equal(files.read(name), tensor.float().numpy())


def test_state_dicts_of_modules_and_of_compiled_modules(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Embedding(4, 3))
    files = TorchTensors(saved(tmp_path, module.state_dict()))
    np.testing.assert_array_equal(files.read('0.weight'), module[0].weight.detach().numpy())
    compiled = OrderedDict((f'_orig_mod.{name}', tensor) for name, tensor in module.state_dict().items())
    assert TorchTensors(saved(tmp_path, compiled)).shapes == files.shapes


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
def test_torch_loads_written_files(tmp_path, dtype):
    arrays = {name: tensor.numpy() for name, tensor in tensors().items()}
    entries = [TensorEntry(name, array.shape, lambda array=array: array) for name, array in arrays.items()]
    names = []
    write_torch_file(tmp_path / 'model_000001.pt', entries, dtype=dtype, on_written=names.append)
    # The default of torch.load refuses pickles that call other functions.
    loaded = torch.load(tmp_path / 'model_000001.pt', weights_only=True)
    assert names == list(loaded) == list(arrays)
    numpy_dtype = {'bfloat16': ml_dtypes.bfloat16}.get(dtype, dtype)
    for name, array in arrays.items():
        assert loaded[name].dtype == getattr(torch, dtype)
        assert loaded[name].is_contiguous()
        np.testing.assert_array_equal(loaded[name].float().numpy(), array.astype(numpy_dtype).astype(np.float32))
    files = TorchTensors(tmp_path / 'model_000001.pt')
    for name in arrays:
        np.testing.assert_array_equal(files.read(name), loaded[name].float().numpy())
    content = (tmp_path / 'model_000001.pt').read_bytes()
    write_torch_file(tmp_path / 'model_000001.pt', entries, dtype=dtype, on_written=names.append)
    assert (tmp_path / 'model_000001.pt').read_bytes() == content


BASE = torch.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize(
    ('value', 'reason'),
    [
        ({'a': BASE[1:]}, 'tensor a is a view'),
        ({'a': BASE.T}, 'tensor a is a view'),
        ({'a': torch.zeros(1).expand(1000, 1000)}, 'tensor a is a view'),
        ({'a': BASE, 'b': BASE}, 'tensors overlap'),
        ({'a': BASE.double()}, 'tensor a has dtype double; must be float32'),
        ({'a': BASE.long()}, 'tensor a has dtype long; must be float32'),
        ({'a': BASE.to(torch.float8_e4m3fn)}, 'which is not allowed'),
        ({'a': BASE.to_sparse()}, 'which is not allowed'),
        ({'a': 1}, 'tensor a is no plain tensor'),
        ({'a': torch.zeros([1] * 9)}, 'tensor a is no plain tensor'),
        ({'a': BASE, '_orig_mod.a': BASE.clone()}, 'with and without the prefix _orig_mod.'),
        ({1: BASE}, 'no dict of named tensors'),
        ([BASE], 'no dict of named tensors'),
        (BASE, 'no dict of named tensors'),
        (torch.nn.Linear(2, 2), 'names torch.nn.modules.linear.Linear, which is not allowed'),
    ],
)
def test_other_values_are_refused(tmp_path, value, reason):
    with pytest.raises(InputError, match=reason) as error:
        TorchTensors(saved(tmp_path, value))
    assert str(tmp_path / 'model.pt') in str(error.value)


def rewritten(path, *, changed=None, **options):
    """Writes an archive again with changed entries, given by the end of their names; None removes one."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, 'w', **options) as archive:
        for name, content in entries.items():
            content = next((new for end, new in (changed or {}).items() if name.endswith(end)), content)
            if content is not None:
                archive.writestr(name, content)
    return path


def pickled(path):
    with zipfile.ZipFile(path) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith('data.pkl')))


def test_damaged_archives_are_refused(tmp_path):
    path = saved(tmp_path, tensors())
    content = pickled(path)
    cases = {
        'has no data.pkl': {'data.pkl': None},
        'big-endian': {'byteorder': b'big'},
        r'data/0 is missing': {'data/0': None},
        'has 4 bytes instead of 60': {'data/0': b'1234'},
        # A storage that claims to be larger than its bytes: the number of elements of the first tensor.
        'is a view of another tensor': {'data.pkl': content.replace(b'K\x0f', b'K\xff', 1)},
        'names torch._utils._rebuild_parameter': {
            'data.pkl': content.replace(b'_rebuild_tensor_v2', b'_rebuild_parameter', 1)
        },
        'names posix.system': {'data.pkl': content.replace(b'ctorch._utils\n_rebuild_tensor_v2', b'cposix\nsystem', 1)},
    }
    for reason, changed in cases.items():
        with pytest.raises(InputError, match=reason):
            TorchTensors(rewritten(saved(tmp_path, tensors()), changed=changed))
    assert TorchTensors(rewritten(saved(tmp_path, tensors()))).read('vector').shape == (7,)


def test_compressed_entries_are_refused(tmp_path):
    path = saved(tmp_path, {'a': torch.zeros(1000, 1000)})
    with pytest.raises(InputError, match='is compressed or too large'):
        TorchTensors(rewritten(path, compression=zipfile.ZIP_DEFLATED))


def test_sizes_are_limited(tmp_path, monkeypatch):
    path = saved(tmp_path, tensors())
    monkeypatch.setattr(torch_reader, 'MAX_PICKLE_BYTES', 100)
    with pytest.raises(InputError, match='is compressed or too large'):
        TorchTensors(path)
    monkeypatch.undo()
    monkeypatch.setattr(torch_reader, 'MAX_DIRECTORY_BYTES', 100)
    with pytest.raises(InputError, match='too many entries'):
        TorchTensors(path)


def test_entries_that_share_bytes_are_refused(tmp_path):
    """A small archive can contain entries inside entries, so that their sizes exceed any memory."""
    inner = np.full(4096, 7.0, np.float32).tobytes()
    info = zipfile.ZipInfo('m/data/1')
    info.file_size = info.compress_size = len(inner)
    info.CRC = zlib.crc32(inner)
    header = info.FileHeader()
    outer = header + inner + bytes(-len(header) % 4)
    path = saved(tmp_path, {'a': torch.zeros(len(outer) // 4), 'b': torch.zeros(4096)})
    content = pickled(path)
    with zipfile.ZipFile(path, 'w') as archive:
        archive.writestr('m/data.pkl', content)
        archive.writestr('m/data/0', outer)
        info.header_offset = archive.fp.tell() - len(outer)
        archive.filelist.append(info)
        archive.NameToInfo[info.filename] = info
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo('m/data/1').file_size == len(inner)
    with pytest.raises(InputError, match='tensors overlap in the file'):
        TorchTensors(path)


def test_a_changed_value_is_detected(tmp_path):
    path = saved(tmp_path, {'a': torch.full((64, 64), 7.0)})
    content = path.read_bytes()
    place = content.index(struct.pack('<f', 7.0) * 8)
    path.write_bytes(content[:place] + b'\1' + content[place + 1 :])
    with pytest.raises(InputError, match='Bad CRC-32'):
        TorchTensors(path).read('a')


@pytest.mark.parametrize('content', [b'', b'PK', b'x' * 200, pickle.dumps({'a': 1}), b'PK\5\6' + bytes(18)])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / 'model.pt'
    path.write_bytes(content)
    with pytest.raises(InputError, match=r'not a complete file of torch\.save|has no data\.pkl'):
        TorchTensors(path)


def test_files_of_old_versions_of_pytorch_are_refused(tmp_path):
    path = tmp_path / 'model.pt'
    torch.save({'a': BASE}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(InputError, match=r'not a complete file of torch\.save'):
        TorchTensors(path)


def test_every_truncated_file_is_refused(tmp_path):
    path = saved(tmp_path, {'a': BASE})
    content = path.read_bytes()
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        with pytest.raises(InputError, match=r'not a complete file of torch\.save'):
            TorchTensors(path)


def test_every_changed_byte_gives_the_values_or_one_line(tmp_path):
    path = saved(tmp_path, {'a': BASE})
    content = path.read_bytes()
    outcomes = set()
    for place in range(0, len(content), 5):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x55]) + content[place + 1 :])
        try:
            files = TorchTensors(path)
            for name in files.shapes:
                # The names and the alignment have no checksum that is read.
                assert files.read(name).shape == files.shapes[name]
            outcomes.add('value')
        except InputError:
            outcomes.add('error')
    assert outcomes == {'value', 'error'}


def test_a_missing_file_gives_one_line(tmp_path):
    with pytest.raises(InputError, match=r'model\.pt: No such file'):
        TorchTensors(tmp_path / 'model.pt')
