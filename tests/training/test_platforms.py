"""Kernels in steps that are lowered for absent accelerators."""

import functools
import re

import jax
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from maxlm.config.loading import load
from maxlm.config.resolve import resolve
from maxlm.parallel.layout import make_layout
from maxlm.training.batch import batch_shapes
from maxlm.training.state import abstract_state
from maxlm.training.step import make_train_step
from tests.conftest import ROOT


@pytest.fixture(scope='module', autouse=True)
def cudnn_9_13():
    with pytest.MonkeyPatch.context() as monkeypatch:
        # Lowering queries the local cuDNN version, which does not exist without a GPU.
        monkeypatch.setattr(fused_attention_stablehlo, 'check_cudnn_version', lambda *_: 91300)
        yield


@functools.cache
def lowered(platform, backend, *overrides, spec='1b.py', devices=1):
    config = load(f'{ROOT}/configs/{spec}', ['train.global_batch_size=32', *overrides])
    config = resolve(config, platform=backend, num_devices=devices, vocab_size=32, windows=100)
    # With several devices, the kernel is inside a partitioning call until the devices are known.
    layout = make_layout(config.mesh, jax.devices()[:devices])
    batch = batch_shapes(config, layout)
    step = jax.jit(make_train_step(config, layout))
    return step.trace(abstract_state(config, layout), batch).lower(lowering_platforms=(platform,)).as_text()


def fused_calls(text):
    return set(re.findall(r'__cudnn\$\w+', text))


def test_gpu_runs_fused_attention_with_documents_masked():
    with_bias = {'__cudnn$fmhaScaleBiasSoftmax', '__cudnn$fmhaScaleBiasSoftmaxBackward'}
    assert fused_calls(lowered('cuda', 'gpu')) == with_bias
    # Negative control: without document isolation, the kernel needs no explicit mask.
    plain = {'__cudnn$fmhaSoftmax', '__cudnn$fmhaSoftmaxBackward'}
    assert fused_calls(lowered('cuda', 'gpu', 'data.document_mask=false')) == plain
    assert fused_calls(lowered('cuda', 'gpu', 'model.attention=xla')) == set()


def test_stages_run_fused_attention_with_documents_masked():
    pipeline = ['mesh.stage=2', 'mesh.fsdp=1', 'model.num_layers=4']
    text = lowered('cuda', 'gpu', *pipeline, devices=2)
    assert 'CustomSPMDPartitioning' in text
    assert 'dot_product_attention' not in lowered('cuda', 'gpu', *pipeline, 'model.attention=xla', devices=2)


def test_tpu_step_lowers():
    text = lowered('tpu', 'tpu')
    assert 'stablehlo.dot_general' in text
    assert fused_calls(text) == set()


def sliding_windows(text):
    return {int(size) for size in re.findall(r'sliding_window_length\\22: (\d+)', text)}


def test_gpu_kernels_know_their_windows():
    overrides = ['model.attention_pattern=SL', 'model.sliding_window=512', 'data.document_mask=false']
    assert sliding_windows(lowered('cuda', 'gpu', *overrides)) == {0, 512}
    # Negative control: without a pattern, there is no sliding window.
    assert sliding_windows(lowered('cuda', 'gpu', overrides[-1])) <= {0}


@pytest.mark.parametrize(
    ('spec', 'platform', 'backend'),
    [
        ('depth.py:24', 'cuda', 'gpu'),
        ('code.py:7b', 'tpu', 'tpu'),
        ('neox.py:tuned', 'cuda', 'gpu'),
        pytest.param('depth.py:24', 'tpu', 'tpu', marks=pytest.mark.nightly),
        pytest.param('code.py:7b', 'cuda', 'gpu', marks=pytest.mark.nightly),
        pytest.param('neox.py:tuned', 'tpu', 'tpu', marks=pytest.mark.nightly),
    ],
)
def test_steps_of_other_families_lower(spec, platform, backend):
    text = lowered(platform, backend, 'train.per_device_batch_size=4', 'data.seq_len=2048', spec=spec)
    assert 'stablehlo.dot_general' in text
    assert bool(fused_calls(text)) == (platform == 'cuda')
