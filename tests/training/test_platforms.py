"""The 1B step lowered for accelerators that are not here: what each would be given to run."""

import re

import jax
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from maxlm.config.load import load
from maxlm.config.resolve import resolve
from maxlm.planning.compile import BATCH_TYPES
from maxlm.training.sharding import make_layout
from maxlm.training.step import abstract_state, make_train_step
from tests.conftest import ROOT


@pytest.fixture
def cudnn_9_13(monkeypatch):
    # Lowering asks the local machine for its cuDNN, which a machine without a GPU does not have.
    monkeypatch.setattr(fused_attention_stablehlo, 'check_cudnn_version', lambda *_: 91300)


def lowered(platform, backend, *overrides):
    config = load(f'{ROOT}/configs/1b.py', ['train.global_batch=32', *overrides])
    config = resolve(config, platform=backend, num_devices=1, vocab_size=50_000, windows=100)
    # One device: with several the kernel hides in a partitioning call until the devices are known.
    layout = make_layout(config.mesh, jax.devices()[:1])
    batch = {name: jax.ShapeDtypeStruct((32, 2048), kind, sharding=layout.batch) for name, kind in BATCH_TYPES.items()}
    step = jax.jit(make_train_step(config, layout))
    return step.trace(abstract_state(config, layout), batch).lower(lowering_platforms=(platform,)).as_text()


def fused_calls(text):
    return set(re.findall(r'__cudnn\$\w+', text))


def test_gpu_runs_fused_attention_with_documents_masked(cudnn_9_13):
    with_bias = {'__cudnn$fmhaScaleBiasSoftmax', '__cudnn$fmhaScaleBiasSoftmaxBackward'}
    assert fused_calls(lowered('cuda', 'gpu')) == with_bias
    # Control: without documents to keep apart the kernel needs no mask of ours.
    plain = {'__cudnn$fmhaSoftmax', '__cudnn$fmhaSoftmaxBackward'}
    assert fused_calls(lowered('cuda', 'gpu', 'data.isolate_documents=false')) == plain
    assert fused_calls(lowered('cuda', 'gpu', 'model.attention=xla')) == set()


def test_tpu_step_lowers():
    text = lowered('tpu', 'tpu')
    assert 'stablehlo.dot_general' in text
    assert fused_calls(text) == set()
