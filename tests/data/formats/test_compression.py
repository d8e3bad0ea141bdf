import io

import pytest
import zstandard

from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.formats.compression import decompressed, is_compressed


def test_compression_is_derived_from_the_name():
    assert is_compressed('x.jsonl.gz')
    assert is_compressed('X.JSONL.ZST')
    assert not is_compressed('x.gz.jsonl')


def test_a_stream_is_read_in_parts_of_any_size():
    data = bytes(range(256)) * 5000
    for size in (1000, 2**20, -1):
        stream = decompressed(io.BytesIO(zstandard.compress(data)), 'x.zst')
        assert b''.join(iter(lambda stream=stream, size=size: stream.read(size), b'')) == data
    assert decompressed(io.BytesIO(data), 'x').read() == data


def test_a_window_larger_than_the_default_is_read():
    parameters = zstandard.ZstdCompressionParameters(window_log=28, write_content_size=False)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    compressed = compressor.compress(b'abc' * 1000) + compressor.flush()
    assert decompressed(io.BytesIO(compressed), 'x.zst', max_window_bytes=2**28).read() == b'abc' * 1000
    # Decompression needs as much memory as the frame demands. The default limit is that of the zstd program.
    with pytest.raises(OSError, match=r'window is larger than 128 MiB; raise --max-record-mib'):
        decompressed(io.BytesIO(compressed), 'x.zst').read()
    assert ReadOptions().max_window_bytes == 2**27
    assert ReadOptions(max_record_bytes=2**28).max_window_bytes == 2**28


def test_garbage_is_rejected():
    with pytest.raises(OSError, match='gzip'):
        decompressed(io.BytesIO(b'garbage'), 'x.gz').read()
    with pytest.raises(OSError, match='zstd'):
        decompressed(io.BytesIO(b'garbage' * 100), 'x.zst').read()
