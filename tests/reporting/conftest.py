import pytest

from maxlm.reporting.run_summary import make_runs
from maxlm.telemetry.run_history import read_history
from tests import workdirs


@pytest.fixture(scope='session')
def run_of(tmp_path_factory):
    """Returns a function for the runs of workdirs in the named states."""
    folder = tmp_path_factory.mktemp('workdirs')

    def make(*names):
        for name in names:
            if not (folder / name).exists():
                workdirs.BUILDERS[name](folder / name)
        return make_runs([read_history(folder / name) for name in names], workdirs.NOW)

    return make
