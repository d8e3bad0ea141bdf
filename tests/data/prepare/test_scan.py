from __future__ import annotations

import dataclasses

import pytest

from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.formats.discovery import find_inputs
from maxlm.data.prepare import partitions as groups_module
from maxlm.data.prepare import scan as survey_module
from maxlm.data.prepare.filter_results import FilterDecision
from maxlm.data.prepare.partitions import ReadSettings, make_partitions
from maxlm.data.prepare.scan import Cleaning, DecisionFile, ScanTask, deduplicate
from maxlm.errors import InputError

NEAR = Cleaning((), 'near', 0.8)


def silent(*_):
    pass


@pytest.fixture
def scans(tmp_path, monkeypatch):
    """Makes scans of texts, one partition each; those in `held_out` are for validation."""
    monkeypatch.setattr(groups_module, 'MIN_GROUP_BYTES', 1)

    def make(texts, cleaning, held_out=()):
        inputs = []
        for directory, part in (('train', texts), ('validation', held_out)):
            (tmp_path / directory).mkdir(exist_ok=True)
            for i, text in enumerate(part):
                (tmp_path / directory / f'{directory}{i}.txt').write_text(text)
            inputs.append(find_inputs([tmp_path / directory]) if part else [])
        (tmp_path / 'work').mkdir(exist_ok=True)
        reading = ReadSettings(ReadOptions(), skip_bad=False)
        return [ScanTask(tmp_path / 'work', group, reading, cleaning) for group in make_partitions(*inputs)]

    return make


def codes_after(scans):
    for scan in scans:
        scan.run(silent)
        assert scan.is_done()
    return [file.load().codes.tolist() for file in deduplicate(scans, silent)]


TEXTS = ['one two three four five six', 'something else entirely is here', 'one two three four five six\r\n']


def test_the_first_of_equal_documents_is_kept(scans):
    assert codes_after(scans(TEXTS, NEAR)) == [
        [FilterDecision.KEPT],
        [FilterDecision.KEPT],
        [FilterDecision.EXACT_DUPLICATE],
    ]


def test_what_is_validated_on_is_kept_before_all(scans):
    made = scans(TEXTS, NEAR, held_out=[TEXTS[0]])
    assert made[-1].partition.is_validation
    found = codes_after(made)
    assert found == [
        [FilterDecision.EXACT_DUPLICATE],
        [FilterDecision.KEPT],
        [FilterDecision.EXACT_DUPLICATE],
        [FilterDecision.KEPT],
    ]
    assert deduplicate(made, silent)[2].load().kept_names == {0: 'validation0.txt'}


def test_filters_come_before_the_comparison(scans):
    # The first would be kept and the third removed; but C4 takes the first for its braces.
    texts = ['lorem ipsum ' + TEXTS[0], TEXTS[1], 'lorem ipsum ' + TEXTS[0]]
    made = scans(texts, Cleaning(('c4',), 'exact', 0.8))
    assert codes_after(made)[0] == codes_after(made)[2] == [FilterDecision.FILTERED]
    _, report = made[0].load()
    assert (report.documents, report.kept_documents) == (1, 0)


def test_an_empty_group_has_no_verdicts(scans):
    assert codes_after(scans(['', TEXTS[0]], NEAR)) == [[FilterDecision.KEPT]]
    empty = scans(['', TEXTS[0]], Cleaning(('code',), 'none', 0.8))
    assert codes_after(empty) == [[FilterDecision.KEPT]]


def test_what_is_judged_is_not_judged_again(scans, monkeypatch):
    made = scans(TEXTS, NEAR)
    files = judge_after_running(made)
    monkeypatch.setattr(survey_module, 'find_duplicates', lambda *_, **__: pytest.fail('is known'))
    assert deduplicate(made, silent) == files
    # Another threshold is another question.
    strict = [dataclasses.replace(one, cleaning=dataclasses.replace(NEAR, near_threshold=0.9)) for one in made]
    assert all(one.is_done() for one in strict)
    with pytest.raises(pytest.fail.Exception):
        deduplicate(strict, silent)


def judge_after_running(made):
    for scan in made:
        scan.run(silent)
    return deduplicate(made, silent)


def test_a_survey_counts_for_what_it_was_made_from(scans):
    (scan,) = scans(TEXTS[:1], NEAR)
    assert not scan.is_done()
    scan.run(silent)
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


def test_verdicts_that_are_gone(tmp_path):
    with pytest.raises(InputError, match='removed or changed'):
        DecisionFile(tmp_path / 'v.json', 'x').load()


def test_progress_is_told(scans):
    (scan,) = scans(TEXTS[:1], NEAR)
    told = []
    scan.run(lambda *new: told.append(new))
    assert told == [(len(TEXTS[0]), 1, 0)]
    steps = []
    deduplicate([scan], lambda *step: steps.append(step))
    assert steps[-1][0] == steps[-1][1]
