import contextlib
import io

from maxlm.data.executors.stage_bar import StageBar, rates


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_bar_shows_bytes_and_rates():
    terminal = Terminal()
    with contextlib.redirect_stderr(terminal), StageBar('shards', total=4_000_000, initial=1_000_000) as bar:
        bar(500_000, 10, 2000)
        bar(500_000, 10, 2000)
        bar._bar.refresh()
        shown = bar._bar.format_dict
        assert (shown['n'], shown['total']) == (2_000_000, 4_000_000)
    text = terminal.getvalue()
    for part in ('shards', '50%', '2.00M/4.00M', 'documents/s', 'tokens/s'):
        assert part in text


def test_rates():
    assert rates(10, 4_000_000, 2.0) == '5 documents/s, 2M tokens/s'
    # A scan does not count tokens.
    assert rates(10, 0, 2.0) == '5 documents/s'
    assert rates(0, 0, 2.0) == ''


def test_steps():
    terminal = Terminal()
    with contextlib.redirect_stderr(terminal), StageBar('duplicates', total=0, unit='step') as bar:
        for done in range(1, 5):
            bar.step(done, 4)
        assert (bar._bar.n, bar._bar.total) == (4, 4)
    assert '4/4' in terminal.getvalue()


def test_a_short_stage_shows_nothing_without_a_terminal():
    for stream, show in ((Terminal(), False), (io.StringIO(), True)):
        with contextlib.redirect_stderr(stream), StageBar('shards', total=10, show=show) as bar:
            bar(10, 1, 1)
            bar.step(1, 2)
        assert stream.getvalue() == ''
