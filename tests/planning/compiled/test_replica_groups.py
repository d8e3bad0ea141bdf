"""Tests the mapping from replica groups, as XLA writes them, to mesh axes."""

import pytest

from maxlm.planning.compiled.replica_groups import find_groups, find_pairs

# The device (data, fsdp, tensor) has the id 4 · data + 2 · fsdp + tensor.
MESH = (('replica', 1), ('data', 2), ('fsdp', 2), ('tensor', 2))

GROUPS = {
    # Explicit lists.
    '{{0,1},{2,3},{4,5},{6,7}}': ('tensor',),
    '{{0,2},{1,3},{4,6},{5,7}}': ('fsdp',),
    '{{0,4},{1,5},{2,6},{3,7}}': ('data',),
    '{{7,5,3,1},{0,2,4,6}}': ('data', 'fsdp'),
    '{{0,1,2,3,4,5,6,7}}': ('data', 'fsdp', 'tensor'),
    '{}': ('data', 'fsdp', 'tensor'),
    # Lists followed by other attributes.
    '{{0,2},{1,3},{4,6},{5,7}}, dimensions={0}, use_global_device_ids=true': ('fsdp',),
    # Neighbors on a ring, and a diagonal: these are no complete axes.
    '{{0,3},{1,2},{4,7},{5,6}}': (),
    # Ids in order, reshaped.
    '[4,2]<=[8]': ('tensor',),
    '[2,4]<=[8]': ('fsdp', 'tensor'),
    '[4,2]<=[4,2]T(1,0)': ('fsdp',),
    '[2,4]<=[4,2]T(1,0)': ('data', 'fsdp'),
    '[4,2]<=[2,4]T(1,0)': ('data',),
    '[4,2]<=[2,2,2]T(0,2,1)': ('fsdp',),
    '[2,4]<=[2,2,2]T(1,0,2)': ('data', 'tensor'),
    # A mesh with axis names.
    "mesh['replica'=1,'data'=2,'fsdp'=2,'tensor'=2] {'fsdp'}": ('fsdp',),
    "mesh['replica'=1,'data'=2,'fsdp'=2,'tensor'=2] {'tensor','data'}, dimensions={0}": ('data', 'tensor'),
    # A mesh of XLA's own, with axes of other sizes.
    "mesh['axis_0'=4,'axis_1'=2] {'axis_0'}": ('data', 'fsdp'),
    "mesh['axis_0'=4,'axis_1'=1,'axis_2'=2] {'axis_2'}": ('tensor',),
    # A mesh of XLA's own, with devices in another order.
    "mesh['axis_0'=1,'axis_1'=2,'axis_2'=4], device_ids=([4,2]T(1,0)) {'axis_1'}": ('tensor',),
    "mesh['axis_0'=2,'axis_1'=2,'axis_2'=2], device_ids=([2,2,2]T(2,1,0)) {'axis_0'}": ('tensor',),
    "mesh['axis_0'=2,'axis_1'=4], device_ids=(0,2,4,6,1,3,5,7) {'axis_0'}": ('tensor',),
    # Sub-axes: of 2 · 2 · 2, the one after the first (1) or the first 2.
    "mesh['x'=8] {'x':(1)2}": ('data',),
    "mesh['x'=8] {'x':(2)2}": ('fsdp',),
    "mesh['x'=8] {'x':(1)4}": ('data', 'fsdp'),
    "mesh['x'=8] {'x':(1)2,'x':(4)2}": ('data', 'tensor'),
}


@pytest.mark.parametrize('text', GROUPS)
def test_groups(text):
    groups = find_groups(text, MESH)
    assert groups.axes == GROUPS[text]
    assert groups.size == (2 ** len(groups.axes) if groups.axes else 2)


def test_the_mesh_decides():
    assert find_groups('[4,2]<=[8]', (('data', 4), ('fsdp', 2))).axes == ('fsdp',)
    assert find_groups('[4,2]<=[8]', (('data', 2), ('fsdp', 4))).axes == ()
    # Groups of one device send nothing.
    assert find_groups('{{0},{1}}', (('data', 2),)) == ((), 1)


@pytest.mark.parametrize(
    'text', ['{{0,1},{2,3}}', '{{0,1},{2,3},{4,5},{6,8}}', "mesh['x'=16] {'x'}", '{{0,0},{1,1},{2,2},{3,3}}', 'all']
)
def test_groups_of_other_devices(text):
    with pytest.raises(ValueError, match='replica groups'):
        find_groups(text, MESH)


def test_pairs():
    assert find_pairs('{{0,1},{1,0},{2,3},{3,2}}', MESH) == (('tensor',), 2)
    assert find_pairs('{{0,2},{4,6}}', MESH) == (('fsdp',), 2)
    # A pair that crosses the end of an axis also moves along the next axis.
    assert find_pairs('{{0,1},{1,2}}', MESH) == (('fsdp', 'tensor'), 4)
    assert find_pairs('{{0,0},{1,1}}', MESH) == ((), 1)
    assert find_pairs('', MESH) == ((), 1)
    with pytest.raises(ValueError):
        find_pairs('{{0,8}}', MESH)
