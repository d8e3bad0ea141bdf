"""Check `data`: the data sets of a run exist and are complete and readable."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from functools import partial

from maxlm.diagnostics.context import CheckContext
from maxlm.diagnostics.result import CheckResult, combine, failure, ok, skipped, warning
from maxlm.errors import InputError
from maxlm.formatting import format_rate, plural
from maxlm.storage.errors import redact

# Number of bytes to read of a shard in a bucket.
READ_BYTES = 2**23
# Maximum size of a local data set whose checksums are verified; it is read in about 10 s.
VERIFIED = 2**34
# A slower bucket probably delays a GPU: up to 4 bytes per token, read by many processes.
MIN_BYTES_PER_SECOND = 5e6


def check_data(context: CheckContext) -> CheckResult:
    """Opens the data as training does, with a temporary cache, and reads the beginning of each source.

    Also verifies the checksums of local data sets up to `VERIFIED` bytes.
    """
    from maxlm.data.dataset.records import verify
    from maxlm.data.loader.dataset import open_training_data
    from maxlm.data.loader.source import HUB
    from maxlm.storage.object_store import open_filesystem, read_range, translate_errors

    if context.config is None:
        return skipped('no --config, so the data is unknown')
    if hub := [path for path in context.data_paths if path.startswith(HUB)]:
        return skipped(f'{hub[0]} is prepared during the run')
    warnings: list[str] = []
    with tempfile.TemporaryDirectory(prefix='maxlm-doctor-') as cache:
        data = dataclasses.replace(context.config.data, cache_dir=cache)
        try:
            corpus = open_training_data(data, with_sources=False, on_warning=warnings.append)
            slow = []
            for source in corpus.sources:
                shards = source.shards('train')
                if not shards:
                    raise InputError(f'{source.dataset.path}: the train split is empty; prepare it with more text')
                if not source.url:
                    source.windows('train', data)[0]
                    if (
                        sum(shard.bytes for split in source.dataset.splits.values() for shard in split.shards)
                        <= VERIFIED
                    ):
                        verify(source.dataset)
                    continue
                url = source.remote_files(shards[:1])[0].url
                filesystem, path = open_filesystem(url)
                began = time.perf_counter()
                stop = min(READ_BYTES, shards[0].bytes)
                content = translate_errors(url, partial(read_range, filesystem, path, 0, stop))
                if len(content) != stop:
                    raise InputError(f'{redact(url)}: {len(content)} bytes instead of {stop}; copy the data again')
                speed = stop / (time.perf_counter() - began)
                if stop == READ_BYTES and speed < MIN_BYTES_PER_SECOND:
                    slow.append(
                        warning(
                            f'{redact(url)}: {format_rate(speed)} from one reader',
                            'copy it closer (maxlm fetch), or raise data.download_threads',
                        )
                    )
        except InputError as error:
            return failure(str(error), 'prepare the data (maxlm prepare), fix data.path, or log in to its bucket')
        tokens = sum(shard.tokens for source in corpus.sources for shard in source.shards('train'))
        names = ', '.join(map(redact, context.data_paths))
        message = f'{names}: {tokens:,} training tokens in {plural(len(corpus.sources), "source")}'
        return combine([*slow, *(warning(text, 'check that the bucket responds') for text in warnings), ok(message)])
