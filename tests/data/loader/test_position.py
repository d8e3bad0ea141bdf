from maxlm.data.loader.batch_rows import BatchRows, sequences_after
from maxlm.data.loader.position import Position


def test_changes_follow_each_other():
    once = Position((), ((3, 5),)).after_change(10, before=4, now=8)
    assert once == (((0, 0, 4), (10, 12, 8)), ((3, 5),))
    # Two batches were skipped before step 10, so 40 sequences are trained and 48 are read.
    assert sequences_after(10, 8, once.changes) == 40
    assert BatchRows.of(8, once.changes).first_row(12) == 48
    twice = once.after_change(15, before=8, now=2)
    assert twice.changes == (*once.changes, (15, 17, 2))
    assert sequences_after(16, 2, twice.changes) == 40 + 5 * 8 + 2
    # A second change without a step in between replaces the first one.
    assert twice.after_change(15, before=2, now=3).changes == (*once.changes, (15, 17, 3))
