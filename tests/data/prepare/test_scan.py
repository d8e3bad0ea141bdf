import dataclasses

import pytest

from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.formats.discovery import find_inputs
from maxlm.data.prepare import partitions as partitions_module
from maxlm.data.prepare import scan as scan_module
from maxlm.data.prepare.filter_results import FilterDecision
from maxlm.data.prepare.partitions import ReadSettings, make_partitions
from maxlm.data.prepare.scan import Cleaning, DecisionFile, ScanTask, deduplicate
from maxlm.errors import InputError

NEAR = Cleaning((), 'near', 0.8)


def ignore(*_):
    pass


@pytest.fixture
def make_scans(tmp_path, monkeypatch):
    """Returns a function that creates one scan per text; the texts in `held_out` are for validation."""
    monkeypatch.setattr(partitions_module, 'MIN_GROUP_BYTES', 1)

    def make(texts, cleaning, held_out=()):
        inputs = []
        for directory, part in (('train', texts), ('validation', held_out)):
            (tmp_path / directory).mkdir(exist_ok=True)
            for i, text in enumerate(part):
                (tmp_path / directory / f'{directory}{i}.txt').write_text(text)
            inputs.append(find_inputs([tmp_path / directory]) if part else [])
        (tmp_path / 'work').mkdir(exist_ok=True)
        reading = ReadSettings(ReadOptions(), skip_bad=False)
        return [ScanTask(tmp_path / 'work', partition, reading, cleaning) for partition in make_partitions(*inputs)]

    return make


def codes_after(scans):
    for scan in scans:
        scan.run(ignore)
        assert scan.is_done()
    return [file.load().codes.tolist() for file in deduplicate(scans, ignore)]


TEXTS = ['one two three four five six', 'something else entirely is here', 'one two three four five six\r\n']


def test_the_first_of_equal_documents_is_kept(make_scans):
    assert codes_after(make_scans(TEXTS, NEAR)) == [
        [FilterDecision.KEPT],
        [FilterDecision.KEPT],
        [FilterDecision.EXACT_DUPLICATE],
    ]


def test_validation_documents_take_precedence(make_scans):
    scans = make_scans(TEXTS, NEAR, held_out=[TEXTS[0]])
    assert scans[-1].partition.is_validation
    found = codes_after(scans)
    assert found == [
        [FilterDecision.EXACT_DUPLICATE],
        [FilterDecision.KEPT],
        [FilterDecision.EXACT_DUPLICATE],
        [FilterDecision.KEPT],
    ]
    assert deduplicate(scans, ignore)[2].load().kept_names == {0: 'validation0.txt'}


def test_filters_run_before_deduplication(make_scans):
    # Without the filter, deduplication would keep the first text and remove the third.
    texts = ['lorem ipsum ' + TEXTS[0], TEXTS[1], 'lorem ipsum ' + TEXTS[0]]
    scans = make_scans(texts, Cleaning(('c4',), 'exact', 0.8))
    assert codes_after(scans)[0] == codes_after(scans)[2] == [FilterDecision.FILTERED]
    _, report = scans[0].load()
    assert (report.documents, report.kept_documents) == (1, 0)


def test_an_empty_partition_has_no_decisions(make_scans):
    assert codes_after(make_scans(['', TEXTS[0]], NEAR)) == [[FilterDecision.KEPT]]
    empty = make_scans(['', TEXTS[0]], Cleaning(('code',), 'none', 0.8))
    assert codes_after(empty) == [[FilterDecision.KEPT]]


def test_deduplication_is_not_repeated(make_scans, monkeypatch):
    scans = make_scans(TEXTS, NEAR)
    files = run_and_deduplicate(scans)
    monkeypatch.setattr(scan_module, 'find_duplicates', lambda *_, **__: pytest.fail('the search is repeated'))
    assert deduplicate(scans, ignore) == files
    # Another threshold requires another deduplication.
    strict = [dataclasses.replace(scan, cleaning=dataclasses.replace(NEAR, near_threshold=0.9)) for scan in scans]
    assert all(scan.is_done() for scan in strict)
    with pytest.raises(pytest.fail.Exception):
        deduplicate(strict, ignore)


def run_and_deduplicate(scans):
    for scan in scans:
        scan.run(ignore)
    return deduplicate(scans, ignore)


def test_a_scan_is_valid_only_for_its_inputs_and_options(make_scans):
    (scan,) = make_scans(TEXTS[:1], NEAR)
    assert not scan.is_done()
    scan.run(ignore)
    assert scan.is_done()
    others = [
        dataclasses.replace(scan, cleaning=Cleaning((), 'exact', 0.8)),
        dataclasses.replace(scan, cleaning=Cleaning(('code',), 'near', 0.8)),
        dataclasses.replace(scan, reading=ReadSettings(ReadOptions(text_key='body'), skip_bad=False)),
    ]
    assert not any(other.is_done() for other in others)
    with pytest.raises(InputError, match='removed or changed'):
        others[0].load()
    scan.signatures_path.unlink()
    assert not scan.is_done()


def test_missing_decisions_are_an_error(tmp_path):
    with pytest.raises(InputError, match='removed or changed'):
        DecisionFile(tmp_path / 'decisions.json', 'x').load()


def test_progress_is_reported(make_scans):
    (scan,) = make_scans(TEXTS[:1], NEAR)
    progress = []
    scan.run(lambda *new: progress.append(new))
    assert progress == [(len(TEXTS[0]), 1, 0)]
    steps = []
    deduplicate([scan], lambda *step: steps.append(step))
    assert steps[-1][0] == steps[-1][1]
