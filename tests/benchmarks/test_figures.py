import json

from benchmarks.figures import RESULTS, main, peers
from tests.conftest import ROOT


def test_figures_are_drawn_from_results(tmp_path):
    assert main([f'--output={tmp_path}']) == 0
    drawn = {path.name: path.read_bytes() for path in tmp_path.glob('*.png')}
    assert drawn.keys() == {'peers_cpu.png'}
    assert all((ROOT / 'docs/figures' / name).stat().st_size > 1000 for name in drawn)


def test_a_panel_has_a_bar_for_each_side():
    results = json.loads((RESULTS / 'peers_cpu2.json').read_text())['results']
    figure = peers(results)
    assert len(figure.axes) == len(results)
    for axes, result in zip(figure.axes, sorted(results, key=lambda result: result['threads']), strict=True):
        widths = sorted(bar.get_width() for bar in axes.patches)
        assert widths == sorted(seconds * 1e3 for seconds in result['seconds'].values())
    # Control: another result gives another image.
    results[0]['seconds']['maxlm'] *= 2
    assert max(bar.get_width() for bar in peers(results).axes[0].patches) > max(
        bar.get_width() for bar in figure.axes[0].patches
    )
