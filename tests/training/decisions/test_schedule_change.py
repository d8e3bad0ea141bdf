import pytest

from maxlm.training.decisions.run_control import RunControl
from maxlm.training.decisions.schedule_change import learning_rate, schedule_change
from tests.small import small_config

SCHEDULE = {'optimizer__schedule': 'linear', 'optimizer__warmup_steps': 2, 'optimizer__learning_rate': 1.0}
HOURS = {'train__num_steps': 0, 'train__hours': 1.0}


@pytest.mark.parametrize(
    ('settings', 'fragments'),
    [
        ({}, None),
        ({'train__log_every': 7}, None),
        ({'train__num_steps': 22}, 'train.num_steps was 12 and is 22: the learning rate of step 8 was 0.5 and is 0.75'),
        (
            {'optimizer__min_learning_rate': 0.5},
            'optimizer.min_learning_rate was 0.0 and is 0.5: the learning rate of step 8 was 0.5 and is 0.75',
        ),
        # The schedule of a budget is a share of the time: half of it is spent.
        (HOURS, 'train.hours was 0.0 and is 1.0: the learning rate of step 8 was 0.5 and is 0.667'),
    ],
)
def test_changes_of_the_schedule_are_reported(settings, fragments):
    old = small_config(**SCHEDULE, train__num_steps=12)
    config = small_config(**{**SCHEDULE, 'train__num_steps': 12, **settings})
    now = RunControl(planned_step=7, planned_share=0.5, warmup_share=0.25) if config.by_budget else RunControl()
    found = schedule_change(old, config, before=RunControl(), now=now, step=7, skipped=0)
    assert (found is None) == (fragments is None)
    if found:
        assert found[0].startswith(fragments)
        assert found[1] == pytest.approx(0.5)
        assert found[2] == pytest.approx(learning_rate(config, now, 7, 0))
    # A skipped step does not count.
    assert learning_rate(config, now, 8, 1) == learning_rate(config, now, 7, 0) or config.by_budget
