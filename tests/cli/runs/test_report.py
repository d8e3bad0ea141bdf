"""`maxlm report` from the command line."""

import functools

import pytest

from maxlm.cli.runs import report
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE
from tests import workdirs
from tests.messages import assert_error_line


@pytest.fixture
def run(run_command):
    return functools.partial(run_command, report.main)


def test_the_page_is_written_to_the_workdir(run, tmp_path):
    workdir = workdirs.finished(tmp_path / 'run')
    code, out, err = run(workdir)
    assert (code, err) == (EXIT_DONE, '')
    assert out.startswith(f'{workdir}/report.html: ')
    assert '<h1>run</h1>' in (workdir / 'report.html').read_text()


def test_several_workdirs_on_one_page(run, tmp_path):
    names = [workdirs.finished(tmp_path / 'a'), workdirs.crashed(tmp_path / 'b')]
    output = tmp_path / 'both.html'
    assert run(*names, '--output', output)[0] == EXIT_DONE
    assert '<h1>a and b</h1>' in output.read_text()
    assert not (names[0] / 'report.html').exists()


def test_a_comparison_does_not_change_the_reports_of_its_runs(run, tmp_path, monkeypatch):
    names = [workdirs.finished(tmp_path / 'a'), workdirs.crashed(tmp_path / 'b')]
    assert run(names[0])[0] == EXIT_DONE
    before = (names[0] / 'report.html').read_bytes()
    monkeypatch.chdir(tmp_path)
    # The second report overwrites the first one, because maxlm wrote it.
    for _ in range(2):
        code, out, _ = run(*names)
        assert code == EXIT_DONE
        assert out.startswith('compare.html: ')
    assert '<h1>a and b</h1>' in (tmp_path / 'compare.html').read_text()
    assert (names[0] / 'report.html').read_bytes() == before


@pytest.mark.parametrize('content', [b'my notes', b'', b'<!doctype html>\n<p>mine', b'\xff\xfe'])
def test_a_file_of_someone_else_is_not_overwritten(run, tmp_path, monkeypatch, content):
    workdir, other = workdirs.finished(tmp_path / 'a'), workdirs.crashed(tmp_path / 'b')
    monkeypatch.chdir(tmp_path)
    for words, path in (
        ([workdir], workdir / 'report.html'),
        ([workdir, other], tmp_path / 'compare.html'),
        ([workdir, '--output', tmp_path / 'mine.html'], tmp_path / 'mine.html'),
    ):
        path.write_bytes(content)
        code, out, err = run(*words)
        assert (code, out) == (EXIT_BAD_INPUT, '')
        assert 'is not a page of maxlm report' in err
        assert path.read_bytes() == content


def test_truncated_lines_are_reported(run, tmp_path):
    code, out, _ = run(workdirs.torn(tmp_path))
    assert code == EXIT_DONE
    assert f'{tmp_path}: metrics.jsonl: skipped the incomplete last line\n' in out


def test_a_directory_without_a_run(run, tmp_path):
    workdir = workdirs.empty(tmp_path / 'run')
    for _ in range(2):
        assert run(workdir) == (EXIT_DONE, f'{workdir}: no run has started, so no page was written\n', '')
    assert list(workdir.iterdir()) == []
    assert run(workdir, '--output', tmp_path / 'page.html')[0] == EXIT_DONE
    assert 'No run has started.' in (tmp_path / 'page.html').read_text()


def test_bad_input(run, tmp_path):
    workdir = workdirs.finished(tmp_path / 'run')
    foreign = tmp_path / 'foreign'
    foreign.mkdir()
    (foreign / 'letter.txt').write_text('hello')
    for words, message in (
        ([tmp_path / 'none'], 'none'),
        ([foreign], 'not a workdir'),
        (['gs://bucket/run'], '--output'),
        (['gs://someone:secret@bucket/run'], '--output'),
        ([workdir, '--output', tmp_path / 'no' / 'such.html'], 'such.html'),
        ([], 'WORKDIR'),
    ):
        code, out, err = run(*words)
        assert (code, out) == (EXIT_BAD_INPUT, '')
        assert_error_line(err, message)
        assert 'secret' not in err


def test_a_workdir_in_a_bucket(run, tmp_path):
    import fsspec

    memory = fsspec.filesystem('memory')
    memory.put(str(workdirs.finished(tmp_path / 'run')), '/runs/far', recursive=True)
    try:
        assert run('memory://runs/far', '--output', tmp_path / 'far.html')[0] == EXIT_DONE
    finally:
        memory.rm('/runs', recursive=True)
    assert '<h1>far</h1>' in (tmp_path / 'far.html').read_text()
