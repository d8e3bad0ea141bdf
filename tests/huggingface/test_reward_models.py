"""Reward models of Transformers: the same scores after export, import and refusals."""

import json

import jax
import numpy as np
import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from maxlm.checkpoint.streaming import ParamsReader
from maxlm.config.serialization import from_json
from maxlm.errors import InputError
from maxlm.huggingface.architectures.reward_models import class_name_of
from maxlm.huggingface.architectures.table import ARCHITECTURES
from maxlm.huggingface.gguf.export_gguf import export_gguf
from maxlm.huggingface.import_model import import_model
from maxlm.training.forward import make_scores
from tests.huggingface.workdirs import MODELS, make_exported
from tests.small import small_config, small_layout

REWARD = {'train__objective': 'reward'}


def scores_of(workdir, tokens):
    """Returns the score at each token, float32 [T]."""
    model = from_json((workdir / 'config.json').read_text()).model
    overrides = {f'model__{key}': getattr(model, key) for key in model.__dataclass_fields__}
    config = small_config(**REWARD, **overrides, data__seq_len=len(tokens), train__global_batch_size=1)
    reader = ParamsReader(workdir / 'checkpoints' / '0')
    params = {}
    for path in reader.shapes:
        *modules, name = path.split('.')
        tree = params
        for module in modules:
            tree = tree.setdefault(module, {})
        tree[name] = reader.read(path)
    ones = np.ones((1, len(tokens)), np.int32)
    batch = {'tokens': tokens[None], 'segments': ones, 'positions': np.arange(len(tokens))[None]}
    scores = jax.jit(make_scores(config, small_layout(config)))(params, None, batch, None)
    return np.asarray(scores)[0]


@pytest.mark.parametrize('name', ['gpt2', 'gpt_neox', 'llama', 'qwen2', 'gemma3'])
def test_scores_equal_those_of_transformers(tmp_path, name):
    _, exported = make_exported(tmp_path, {**MODELS[name], **REWARD})
    import_model(str(exported), str(tmp_path / 'again'), show=False)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(exported, dtype=torch.float32)
    assert theirs.config.num_labels == 1
    tokens = np.random.default_rng(0).integers(1, 90, 21, dtype=np.int32)
    scores = scores_of(tmp_path / 'again', tokens)
    with torch.no_grad():
        for length in (9, 21):
            expected = theirs(torch.tensor(tokens[None, :length])).logits
            assert scores[length - 1] == pytest.approx(expected.item(), rel=1e-4, abs=1e-4)
    assert np.ptp(scores) > 0.1


def test_the_names_of_classes_are_those_of_transformers():
    model = small_config(**REWARD).model
    for kind, row in ARCHITECTURES.items():
        expected = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(kind)
        if expected is None:
            with pytest.raises(InputError, match='no reward models'):
                class_name_of(row, model)
        else:
            assert class_name_of(row, model) == expected


def test_classifiers_with_several_labels_and_other_formats_are_refused(tmp_path):
    run, exported = make_exported(tmp_path, {**MODELS['llama'], **REWARD})
    with pytest.raises(InputError, match='GGUF cannot express reward models'):
        export_gguf(str(run), str(tmp_path / 'model.gguf'), dtype='f32', show=False)
    settings = json.loads((exported / 'config.json').read_text())
    # An answer may end with the end of text, which must not count as padding.
    assert settings['pad_token_id'] is None
    settings['id2label'] = {'0': 'no', '1': 'yes'}
    (exported / 'config.json').write_text(json.dumps(settings))
    with pytest.raises(InputError, match='LlamaForSequenceClassification has 2 labels'):
        import_model(str(exported), str(tmp_path / 'again'), show=False)
