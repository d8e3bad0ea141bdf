"""Tests that images and pages are complete, reproducible and self-contained."""

import re
import struct
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from maxlm.errors import InputError
from maxlm.planning.budget import plan_budget
from maxlm.planning.plots import budget_figure, scaling_figure, write_html, write_png
from maxlm.planning.scaling import sweep
from tests.conftest import ROOT
from tests.planning.test_budget import machine, points
from tests.planning.test_scaling import DATA, H100, config, with_overhead


@pytest.fixture(scope='module')
def rows():
    return sweep(config(), H100, [8, 16, 32, 64, 4096], with_overhead, DATA)


@pytest.fixture(scope='module')
def plan():
    return plan_budget(points(machine(limit=3e10)), H100, hours=100)


def size(png):
    return struct.unpack('>II', png[16:24])


def test_a_figure_of_scaling(rows, tmp_path):
    for name, shown in {'a': rows, 'again': rows, 'other': rows[:3]}.items():
        write_png(scaling_figure(shown, 'a title'), tmp_path / f'{name}.png')
    first, again, other = ((tmp_path / f'{name}.png').read_bytes() for name in ('a', 'again', 'other'))
    assert first.startswith(b'\x89PNG')
    assert size(first) == (1560, 660)
    # Hashes are compared because pytest would take minutes to show the difference of two images.
    assert hash(first) == hash(again)
    assert hash(first) != hash(other)


def test_the_contents_of_the_scaling_figure(rows):
    speed, mfu = scaling_figure(rows, '').axes
    labels = [text.get_text() for text in speed.get_legend().get_texts()]
    assert labels == ['weak: batch grows with devices', 'strong: fixed batch', 'ideal']
    lines = {line.get_label(): line for line in speed.lines}
    strong = [row for row in rows if row.kind == 'strong' and not row.refusal]
    assert list(lines['strong: fixed batch'].get_xdata()) == [row.num_devices for row in strong] == [8, 16, 32, 64]
    assert list(lines['strong: fixed batch'].get_ydata()) == [row.tokens_per_second for row in strong]
    ideal = lines['ideal'].get_ydata()
    assert ideal[1] / ideal[0] == pytest.approx(4096 / 8)
    assert [tick.get_text() for tick in speed.get_xticklabels()] == ['4 096', '64', '32', '16', '8']
    assert (speed.get_xscale(), speed.get_yscale(), mfu.get_yscale()) == ('log', 'log', 'linear')
    assert mfu.get_ylim()[0] == 0
    assert all(axes.get_title(loc='left') and axes.get_xlabel() for axes in (speed, mfu))


def test_layouts_that_do_not_fit_have_hollow_markers(rows):
    def texts(shown):
        return [text.get_text() for text in scaling_figure(shown, '').axes[0].get_legend().get_texts()]

    assert 'does not fit' not in texts(rows)
    assert 'does not fit' in texts([row._replace(fits=row.num_devices > 8) for row in rows])


def test_the_contents_of_the_budget_figure(plan):
    loss, tokens = budget_figure(plan, 'a title').axes
    assert list(loss.lines[0].get_ydata()) == [row.loss for row in plan.rows]
    assert list(tokens.lines[0].get_ydata()) == [row.tokens for row in plan.rows]
    best = next(line for line in loss.lines if line.get_label() == 'best')
    assert (best.get_xdata()[0], best.get_ydata()[0]) == (plan.optimum.parameters, plan.optimum.loss)
    assert 'does not fit' in [text.get_text() for text in loss.get_legend().get_texts()]


def test_no_figures_no_error():
    assert len(scaling_figure([], '').axes) == 2


def test_a_page_is_self_contained(rows, plan, tmp_path):
    path = tmp_path / 'page.html'
    write_html(path, 'Plan <of> a run', rows=rows, plan=plan, notes=['an estimate & no more'])
    page = path.read_text()
    assert '<title>Plan &lt;of&gt; a run</title>' in page
    assert 'an estimate &amp; no more' in page
    assert page.count('<svg') == page.count('</svg>') == 2
    assert page.count('<tr>') == len(rows) + len(plan.rows) + 2
    assert 'strong on 4096: train.global_batch_size=64 cannot be split' in page
    # The page loads nothing: it has no script, and no addresses but XML namespaces.
    assert '<script' not in page
    assert re.findall(r'(?:src|href)="(?!#)([^"]*)"', page) == []
    assert set(re.findall(r'https?://([^/"]+)', page)) <= {'www.w3.org', 'purl.org', 'creativecommons.org'}
    for picture in re.findall(r'<svg.*?</svg>', page, re.DOTALL):
        ElementTree.fromstring(picture)
    write_html(tmp_path / 'again.html', 'Plan <of> a run', rows=rows, plan=plan, notes=['an estimate & no more'])
    assert hash((tmp_path / 'again.html').read_text()) == hash(page)


def test_two_figures_on_a_page_share_no_ids(rows, plan, tmp_path):
    write_html(tmp_path / 'page.html', 'both', rows=rows, plan=plan)
    names = re.findall(r'\bid="([^"]+)"', (tmp_path / 'page.html').read_text())
    assert names
    assert len(names) == len(set(names))


def test_a_page_with_one_figure(rows, tmp_path):
    write_html(tmp_path / 'page.html', 'rows', rows=rows)
    assert (tmp_path / 'page.html').read_text().count('<svg') == 1


def test_a_file_that_cannot_be_written(rows, tmp_path):
    with pytest.raises(InputError, match='No such file or directory; choose a writable file'):
        write_png(scaling_figure(rows, ''), tmp_path / 'nowhere' / 'a.png')
    with pytest.raises(InputError, match='Is a directory'):
        write_html(tmp_path, 'a title', rows=rows)


@pytest.mark.multiprocess
def test_neither_matplotlib_nor_scipy_is_imported_at_import():
    program = (
        'import sys, maxlm.planning.plots as plots, maxlm.planning.chinchilla\n'
        "print('matplotlib' in sys.modules, 'scipy.optimize' in sys.modules)\n"
        "plots.scaling_figure([], '')\n"
        "print('matplotlib' in sys.modules, 'matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ['False', 'False', 'True', 'False']
