"""Preparations that several commands run by stages and shares write the same bytes as one command."""

import json
import os
import random
import re
import threading

import pytest
import tokenizers

from maxlm.data.executors import executor
from maxlm.data.parts import bucket_task
from maxlm.data.parts.share import STAGES
from maxlm.data.prepare import existing_output, pipeline
from maxlm.data.prepare.existing_output import locked
from maxlm.data.prepare.write_shards import WriteShards
from maxlm.data.tokenizer.tokenizer import bytes_tokenizer
from maxlm.errors import InputError
from maxlm.storage.bucket import Bucket
from tests.data.parts.stages import OPTIONS, objects, run_stages
from tests.messages import assert_error_line
from tests.preparing import contents, run


class Killed(BaseException):
    """Ends a command at any place, as a kill does."""


def test_stages_in_a_bucket_write_the_same_bytes(gcs, in_bucket, expected, tmp_path):
    assert run_stages(*in_bucket, count=3) == [0] * 8
    assert objects(gcs) == expected
    # No machine keeps files.
    assert not [path for folder in ('tmp', 'cache') for path in (tmp_path / folder).rglob('*') if path.is_file()]
    # Negative control: another option writes other bytes.
    others = [*in_bucket[:-1], 'gs://bucket/other', '--fim-spm-rate', 0.3]
    assert run_stages(*others, count=3) == [0] * 8
    assert objects(gcs, 'other') != expected


def test_stages_in_s3_write_the_same_bytes(s3, inputs, expected, tmp_path):
    arguments = [*inputs, *OPTIONS, '--cache', tmp_path / 'cache', '--output', 's3://bucket/web']
    assert run_stages(*arguments) == [0] * 6
    names = [found['Key'] for found in s3.list_objects_v2(Bucket='bucket')['Contents']]
    files = {name: s3.get_object(Bucket='bucket', Key=name)['Body'].read() for name in names}
    assert {name.removeprefix('web/'): content for name, content in files.items()} == expected


def test_stages_in_a_shared_directory_write_the_same_bytes(inputs, expected, tmp_path):
    arguments = [*inputs, *OPTIONS, '--output', tmp_path / 'data']
    # One command completes what stages began.
    assert run_stages(*arguments, stages=STAGES[:2]) == [0] * 3
    assert run_stages(*arguments, stages=STAGES[2:]) == [0] * 3
    assert contents(tmp_path / 'data') == expected


def test_one_command_completes_the_stages_of_others(gcs, in_bucket, expected, monkeypatch):
    assert run(*in_bucket, '--stage', 'scan', '--task', '1/2') == 0
    scans = [name for name in objects(gcs) if name.startswith('.prepare/survey-')]
    before = {name: stored.generation for (_, name), stored in gcs.objects.items()}
    stored = {}
    publish = WriteShards.run
    monkeypatch.setattr(WriteShards, 'run', lambda task, report: [stored.update(gcs.objects), publish(task, report)])
    assert run(*in_bucket) == 0
    assert objects(gcs) == expected
    assert len(scans) > 2
    # The finished scans were not repeated.
    assert all(stored['bucket', f'web/{name}'].generation == before[f'web/{name}'] for name in scans)


def test_conversations_without_a_scan(gcs, tmp_path):
    lines = [
        {'messages': [{'role': 'user', 'content': f'{i} plus {i}?'}, {'role': 'assistant', 'content': str(2 * i)}]}
        for i in range(200)
    ]
    (tmp_path / 'chats.jsonl').write_text('\n'.join(map(json.dumps, lines)))
    (tmp_path / 'held-out.jsonl').write_text('\n'.join(map(json.dumps, lines[::20])))
    arguments = ['--input', tmp_path / 'chats.jsonl', '--validation', tmp_path / 'held-out.jsonl', '--pack-seq-len', 64]
    arguments += ['--tokenizer', 'bpe:300', '--quiet', '--workers', 1, '--cache', tmp_path / 'cache', '--output']
    assert run(*arguments, tmp_path / 'expected') == 0
    assert run_stages(*arguments, 'gs://bucket/web') == [0] * 6
    assert objects(gcs) == contents(tmp_path / 'expected')


def test_tokenizers_with_a_beginning_of_documents(gcs, inputs, tmp_path, capsys):
    library = tokenizers.Tokenizer.from_str(bytes_tokenizer().to_json())
    library.add_special_tokens(['<bos>'])
    library.save(str(tmp_path / 'tokenizer.json'))
    names = {'bos_token': '<bos>', 'eos_token': '<|endoftext|>', 'add_bos_token': True}
    (tmp_path / 'tokenizer_config.json').write_text(json.dumps(names))
    arguments = [*inputs, '--tokenizer', tmp_path / 'tokenizer.json', '--quiet', '--workers', 1]
    arguments += ['--cache', tmp_path / 'cache', '--output']
    assert run(*arguments, tmp_path / 'expected') == 0
    assert run_stages(*arguments, 'gs://bucket/web') == [0] * 6
    assert objects(gcs) == contents(tmp_path / 'expected')
    assert 'text_boundaries.json' in objects(gcs)
    # An object that is lost is noticed before shards are written with other boundaries.
    assert run_stages(*arguments, 'gs://bucket/other', stages=STAGES[:2]) == [0] * 3
    del gcs.objects['bucket', 'other/text_boundaries.json']
    assert run(*arguments, 'gs://bucket/other', '--stage', 'shards') == 2
    assert 'run --stage plan' in capsys.readouterr().err


def test_kills_at_any_upload_leave_the_same_bytes(gcs, in_bucket, expected, monkeypatch):
    rng, upload = random.Random(7), bucket_task.upload_file
    left, kills = 0, 0

    def upload_or_die(bucket, name, path):
        nonlocal left
        left -= 1
        if left == 0 and rng.random() < 0.5:
            raise Killed
        upload(bucket, name, path)
        if left == 0:
            raise Killed

    monkeypatch.setattr(bucket_task, 'upload_file', upload_or_die)
    for stage in STAGES:
        for share in ('0/2', '1/2') if stage in ('scan', 'shards') else ('',):
            while True:
                left = rng.randrange(1, 7)
                try:
                    assert run(*in_bucket, '--stage', stage, *(['--task', share] if share else [])) == 0
                    break
                except Killed:
                    kills += 1
    assert objects(gcs) == expected
    assert kills > 5


@pytest.mark.parametrize('stage', [[], ['--stage', 'merge']])
def test_a_kill_after_the_manifest_leaves_no_temporary_files(gcs, in_bucket, expected, monkeypatch, stage):
    assert run_stages(*in_bucket, stages=STAGES[:3]) == [0] * 5
    gcs.put('bucket', 'web/train-00099.arrayrecord', b'of an earlier data set')
    delete = Bucket.delete
    deleted = []

    def delete_or_die(bucket, names):
        if 'web/dataset.json' in {name for _, name in gcs.objects}:
            deleted.extend(names)
            if len(deleted) > 3:
                raise Killed
        delete(bucket, names)

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, 'delete', delete_or_die)
        with pytest.raises(Killed):
            run(*in_bucket, '--stage', 'merge')
    assert 'web/train-00099.arrayrecord' not in {name for _, name in gcs.objects}
    assert objects(gcs).keys() > expected.keys()
    assert run(*in_bucket, *stage) == 0
    assert objects(gcs) == expected
    # Negative control: without temporary files, a file of the user is kept.
    gcs.put('bucket', 'web/train-00099.arrayrecord', b'')
    assert run(*in_bucket, *stage) == 0
    assert len(objects(gcs)) == len(expected) + 1


@pytest.mark.parametrize('damage', ['missing', 'truncated'])
def test_a_lost_shard_is_never_used(gcs, in_bucket, expected, capsys, damage):
    assert run_stages(*in_bucket, stages=STAGES[:3]) == [0] * 5
    name = next(name for _, name in gcs.objects if name.startswith('web/train-'))
    stored = gcs.objects.pop(('bucket', name))
    if damage == 'truncated':
        gcs.put('bucket', name, stored.content[:-1])
    assert run(*in_bucket, '--stage', 'merge') == 2
    error = capsys.readouterr().err
    assert error.count('\n') == 1
    assert re.search(r'--stage=merge: 1 of \d+ partitions lack the result of stage shards, for example ', error)
    assert 'web/dataset.json' not in {name for _, name in gcs.objects}
    assert run_stages(*in_bucket, stages=STAGES[2:]) == [0] * 3
    assert objects(gcs) == expected


def test_stages_in_the_wrong_order_are_refused(in_bucket, capsys):
    for stage, before in (('plan', 'scan'), ('shards', 'plan'), ('merge', 'scan')):
        assert run(*in_bucket, '--stage', stage) == 2
        assert_error_line(capsys.readouterr().err, f'--stage={stage}: ', f'run --stage {before}')


@pytest.mark.parametrize('in_directory', [True, False])
def test_changed_inputs_and_options_are_named(gcs, in_bucket, expected, tmp_path, capsys, in_directory):
    arguments = [*in_bucket[:-1], tmp_path / 'data'] if in_directory else in_bucket
    assert run_stages(*arguments, stages=STAGES[:1]) == [0] * 2
    book = tmp_path / 'inputs' / 'books' / '3.txt'
    text, times = book.read_text(), (book.stat().st_atime_ns, book.stat().st_mtime_ns)

    def refused(*more):
        capsys.readouterr()
        assert run(*arguments, '--stage', 'plan', *more) == 2
        error = capsys.readouterr().err
        assert error.count('\n') == 1
        assert 'contains an unfinished preparation from other inputs or options' in error
        return error

    book.write_text(text + '!')
    assert f'{book}, which has changed' in refused()
    book.unlink()
    assert f'{book}, which is missing' in refused()
    book.write_text(text)
    os.utime(book, ns=times)
    assert 'infill 0.25 instead of 0.5' in refused('--fim-rate', 0.25)
    # Control: with the same inputs, it continues.
    assert run_stages(*arguments, stages=STAGES[1:]) == [0] * 4
    assert (contents(tmp_path / 'data') if in_directory else objects(gcs)) == expected


def test_two_coordinators_at_once(gcs, in_bucket, expected, monkeypatch, capsys):
    """The second command starts while the first one writes shards, and completes the data set before it."""
    assert run(*in_bucket, '--stage', 'scan') == 0
    write, nested = WriteShards.run, []

    def write_after_the_other(task, report):
        if not nested:
            nested.append(0)
            nested[0] = run(*in_bucket)
            assert objects(gcs) == expected
        write(task, report)

    monkeypatch.setattr(WriteShards, 'run', write_after_the_other)
    assert run(*in_bucket[:-1], 'gs://bucket/web') == 0
    assert nested == [0]
    assert {name: content for name, content in objects(gcs).items() if name[0] != '.'} == expected


def test_a_bucket_that_fails_is_retried(gcs, in_bucket, expected, monkeypatch):
    assert run_stages(*in_bucket, stages=STAGES[:2]) == [0] * 3
    pauses = []
    run_tasks = executor.run_tasks

    def repair(seconds):
        pauses.append(seconds)
        gcs.faults.clear()

    monkeypatch.setattr(pipeline, 'run_tasks', lambda *args, **options: run_tasks(*args, **options, sleep=repair))
    gcs.fault(503, 'web/.prepare/decisions-00003.json')
    assert run_stages(*in_bucket, stages=STAGES[2:]) == [0] * 3
    assert pauses == [1.0]
    assert objects(gcs) == expected


def test_parallel_shares_of_one_directory(inputs, expected, tmp_path):
    arguments = [*inputs, *OPTIONS, '--output', tmp_path / 'data']
    assert run_stages(*arguments, stages=STAGES[:2]) == [0] * 3
    codes = []

    def write(index):
        codes.append(run(*arguments, '--stage', 'shards', '--task', f'{index}/3'))

    threads = [threading.Thread(target=write, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0] * 3
    assert run(*arguments, '--stage', 'merge') == 0
    assert contents(tmp_path / 'data') == expected


def test_shares_exclude_other_commands_but_not_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(existing_output, 'LOCK_SECONDS', 0.0)
    with locked(tmp_path, is_share=True):
        with locked(tmp_path, is_share=True):
            pass
        with pytest.raises(InputError, match='another maxlm prepare is writing to it'), locked(tmp_path):
            pass
    with locked(tmp_path):
        pass
