"""Token archives as Hugging Face tokenizers and NumPy users save them."""

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from maxlm.data.documents.document import raise_bad
from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.formats.discovery import find_inputs
from maxlm.data.formats.file_ranges import read_documents, split_file
from maxlm.errors import InputError

# Three rows of up to six tokens with right padding by 0.
IDS = np.array([[5, 6, 7, 0, 0, 0], [8, 9, 10, 11, 12, 13], [14, 0, 0, 0, 0, 0]])
MASK = (IDS > 0).astype(np.int64)
LENGTHS = MASK.sum(axis=1)
DOCUMENTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [14]]
STREAM = np.arange(5, 15)
DOC = {f'doc_{i}': ids for i, ids in enumerate(np.split(np.arange(3, 30, dtype='uint16'), [5, 12, 14]))}
PADDED = IDS[:, ::-1].copy()  # padding on the left, in reversed order


def read(path, target=2**40, on_bad=raise_bad, **options):
    return [
        document
        for file in find_inputs([path])
        for file_range in split_file(file, target)
        for document in read_documents(file_range, ReadOptions(**options), on_bad)
    ]


def ids_of(documents):
    return [document.tokens.tolist() for document in documents]


def faults(path, **options):
    bad = []
    documents = read(path, on_bad=lambda name, reason: bad.append((name, reason)), **options)
    assert all('\n' not in reason for _, reason in bad)
    return ids_of(documents), bad


@pytest.mark.parametrize('save', [np.savez, np.savez_compressed])
@pytest.mark.parametrize(
    ('arrays', 'expected'),
    [
        ({'input_ids': IDS, 'attention_mask': MASK}, DOCUMENTS),
        ({'attention_mask': MASK, 'input_ids': IDS}, DOCUMENTS),
        ({'tokens': IDS.astype('uint16'), 'attention_mask': MASK.astype(bool)}, DOCUMENTS),
        ({'ids': IDS.astype('int32'), 'attention_mask': MASK.astype('float32')}, DOCUMENTS),
        ({'arr_0': IDS, 'attention_mask': MASK.astype('int8')}, DOCUMENTS),
        ({'input_ids': PADDED, 'attention_mask': MASK[:, ::-1].copy()}, [ids[::-1] for ids in DOCUMENTS]),
        ({'input_ids': IDS - 100 * (1 - MASK), 'attention_mask': MASK}, DOCUMENTS),
        ({'input_ids': IDS, 'attention_mask': MASK * [[1], [0], [1]]}, [DOCUMENTS[0], DOCUMENTS[2]]),
        ({'input_ids': IDS, 'attention_mask': MASK * 0}, []),
        ({'input_ids': IDS, 'sequence_lengths': LENGTHS}, DOCUMENTS),
        ({'input_ids': IDS, 'lengths': LENGTHS[:, None].astype('uint8')}, DOCUMENTS),
        ({'input_ids': IDS, 'attention_mask': MASK, 'lengths': LENGTHS}, DOCUMENTS),
        # Tokenizers of Hugging Face return the padded length.
        ({'input_ids': IDS, 'attention_mask': MASK, 'length': [6, 6, 6]}, DOCUMENTS),
        ({'input_ids': IDS, 'length': np.int64(6)}, IDS.tolist()),
        ({'input_ids': IDS, 'attention_mask': MASK, 'labels': np.where(MASK, IDS, -100)}, DOCUMENTS),
        ({'input_ids': IDS, 'labels': np.array([0, 1, 1])}, IDS.tolist()),
        ({'input_ids': IDS, 'token_type_ids': MASK * 0, 'special_tokens_mask': 1 - MASK}, IDS.tolist()),
        (
            {'input_ids': IDS, 'url': ['a', 'b', 'c'], 'score': [0.1, 0.2, 0.3], 'vocab_size': 50, 'n': [3]},
            IDS.tolist(),
        ),
        ({'input_ids': STREAM}, [STREAM.tolist()]),
        ({'input_ids': STREAM, 'attention_mask': [0] * 4 + [1] * 3 + [0] * 3}, [[9, 10, 11]]),
        ({'tokens': STREAM, 'lengths': [3, 0, 6, 1]}, [[5, 6, 7], [8, 9, 10, 11, 12, 13], [14]]),
        ({'tokens': STREAM, 'doc_lengths': [4, 6]}, [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14]]),
        ({'input_ids': STREAM, 'attention_mask': STREAM > 8, 'length': [10]}, [[9, 10, 11, 12, 13, 14]]),
        ({'tokens': IDS, 'meta': np.array({'a': 1}, object)}, IDS.tolist()),
        ({'whatever': IDS}, IDS.tolist()),
        ({f'd{i}': STREAM for i in range(4)}, [STREAM.tolist()] * 4),
        (DOC, [ids.tolist() for ids in DOC.values()]),
        ({f'arr_{i}': ids for i, ids in enumerate(DOC.values())}, [ids.tolist() for ids in DOC.values()]),
        ({'0': IDS[:1], '1': IDS[1:]}, IDS.tolist()),
        ({'tokens_0': IDS[0], 'tokens_1': IDS[1]}, IDS[:2].tolist()),
    ],
)
def test_only_tokens_are_read(tmp_path, save, arrays, expected):
    save(tmp_path / 'x.npz', **arrays)
    for target in (1, 2**40):
        assert ids_of(read(tmp_path / 'x.npz', target)) == expected


def test_documents_end_at_the_end_token_and_keep_their_place(tmp_path):
    np.savez(tmp_path / 'x.npz', attention_mask=MASK, input_ids=IDS)
    documents = read(tmp_path / 'x.npz', end_of_document=10)
    assert [(d.name, d.tokens.tolist()) for d in documents] == [
        ('x.npz:input_ids:0', [5, 6, 7]),
        ('x.npz:input_ids:6', [8, 9]),
        ('x.npz:input_ids:9', [11, 12, 13]),
        ('x.npz:input_ids:12', [14]),
    ]


@pytest.mark.parametrize(
    ('arrays', 'message'),
    [
        ({'input_ids': IDS, 'tokens': IDS}, 'several arrays of tokens: the arrays input_ids, tokens'),
        (
            {'a': IDS, 'b': IDS},
            'the arrays a, b, and none is known to contain the tokens; save the tokens as input_ids',
        ),
        ({'train': STREAM, 'validation': STREAM}, 'the arrays train, validation, and none'),
        ({'attention_mask': MASK}, 'the array attention_mask, and none is known'),
        ({'loss_mask': MASK}, 'the array loss_mask, and none is known'),
        ({'train_lengths': LENGTHS}, 'the array train_lengths, and none is known'),
        ({'ids': IDS, 'mask': MASK}, 'the array mask beside the tokens ids'),
        ({'input_ids': IDS, 'loss_mask': MASK}, 'loss_mask beside the tokens input_ids, with an unknown meaning'),
        ({'tokens': IDS, 'loss_weights': MASK.astype(float)}, 'loss_weights beside the tokens tokens'),
        ({'input_ids': IDS, 'position_ids': MASK, 'doc': LENGTHS}, 'the arrays position_ids, doc beside'),
        ({'tokens': STREAM, 'offsets': [0, 3, 10]}, 'the array offsets beside'),
        ({'arr_0': IDS, 'arr_1': MASK}, 'which include arr_1, whose values are 0 and 1, as in a mask'),
        ({'arr_0': STREAM, 'arr_1': STREAM * 0 + 1}, 'arr_1, whose values are 0 and 1'),
        ({'arr_0': IDS, 'arr_1': LENGTHS}, 'which have different dtypes or numbers of dimensions'),
        ({'arr_0': STREAM, 'arr_1': STREAM + 1}, 'which contain the same tokens, as inputs and labels do'),
        ({'arr_0': IDS, 'arr_1': IDS}, 'the same tokens'),
        ({'arr_0': STREAM, 'arr_1': [6, 4]}, 'arr_1, whose values are the lengths or positions of documents'),
        ({'arr_0': STREAM, 'arr_1': [0, 6]}, 'lengths or positions'),
        ({'arr_0': [0, 4, 10], 'arr_1': STREAM}, 'arr_0, whose values are the lengths or positions of documents'),
        ({'attention_mask_0': IDS, 'attention_mask_1': IDS}, 'none is known'),
        (
            {'input_ids': IDS, 'attention_mask': MASK[:, :5]},
            'attention_mask has the shape (3, 5), and the tokens (3, 6)',
        ),
        ({'input_ids': IDS, 'attention_mask': MASK[:, None]}, 'attention_mask has 3 dimensions'),
        ({'input_ids': IDS, 'labels': MASK[:, :2]}, 'labels has the shape (3, 2)'),
        ({'input_ids': IDS, 'lengths': [1, 2]}, 'lengths has 2 values for 3 rows of tokens'),
        ({'tokens': STREAM, 'lengths': [5, 6]}, 'the sum of lengths is 11, and there are 10 tokens'),
        ({'tokens': STREAM, 'lengths': [11, -1]}, 'lengths contains -1'),
        ({'input_ids': np.array([[1], [1, 2]], object), 'length': [1, 2]}, 'never unpickled'),
    ],
)
def test_arrays_without_a_clear_meaning_are_refused_by_name(tmp_path, arrays, message):
    np.savez(tmp_path / 'x.npz', **arrays)
    documents, bad = faults(tmp_path / 'x.npz')
    assert documents == []
    ((_, reason),) = bad
    assert reason.startswith(f'{tmp_path / "x.npz"}')
    assert message in reason


@pytest.mark.parametrize(
    ('arrays', 'message'),
    [
        ({'attention_mask': MASK * [[1], [1], [1]] + [[0], [1], [0]]}, 'row 1: attention_mask contains 2'),
        (
            {'attention_mask': 1 - np.eye(3, 6, 1, int) * [[0], [1], [0]]},
            'row 1: attention_mask has zeros between tokens',
        ),
        ({'lengths': [3, 7, 1]}, 'row 1: lengths is 7, and the row has 6 tokens'),
        ({'lengths': [3, 4, 1]}, 'row 1: lengths is 4, but the tokens after it are not one repeated token'),
        ({'lengths': [3, 5, 1], 'num_tokens': [3, 4, 1]}, 'row 1: num_tokens is 4, and other lengths have 5 tokens'),
        ({'attention_mask': MASK, 'lengths': [3, 5, 1]}, 'row 1: lengths is 5, and attention_mask has 6 tokens'),
        (
            {'labels': IDS * [1, 1, 1, 1, 1, 1] - 100 * np.eye(3, 6, 1, int) * [[0], [1], [0]]},
            'row 1: labels exclude token 8',
        ),
    ],
)
def test_contradictions_in_a_row_are_named(tmp_path, arrays, message):
    np.savez(tmp_path / 'x.npz', input_ids=IDS, **arrays)
    documents, bad = faults(tmp_path / 'x.npz')
    assert len(documents) == 2
    ((name, reason),) = bad
    assert name == 'x.npz:input_ids:6'
    assert message in reason


@pytest.mark.parametrize('side', ['left', 'right'])
def test_output_of_a_tokenizer_of_hugging_face(tmp_path, side):
    transformers = pytest.importorskip('transformers')
    words = {word: i for i, word in enumerate(['<pad>', '</s>', 'a', 'b', 'c'])}
    library = tokenizers.Tokenizer(models.WordLevel(words, unk_token='<pad>'))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, pad_token='</s>', eos_token='</s>', padding_side=side
    )
    texts = ['a b c', 'b', '', 'c c']
    extra = {'return_special_tokens_mask': True, 'return_token_type_ids': True, 'return_length': True}
    encoded = tokenizer(texts, padding='max_length', max_length=8, return_tensors='np', **extra)
    np.savez(tmp_path / 'x.npz', **encoded)
    assert ids_of(read(tmp_path / 'x.npz')) == [tokenizer(text)['input_ids'] for text in texts if text]


@pytest.mark.parametrize(
    'name', ['attention_mask.npy', 'train_mask.npy', 'Labels.npy', 'x_lengths.npy', 'loss_mask.bin']
)
def test_files_of_masks_are_not_read_as_tokens(tmp_path, name):
    np.save(tmp_path / 'ids.npy', IDS)
    assert find_inputs([tmp_path])
    (tmp_path / 'nested').mkdir()
    (tmp_path / 'nested' / name).write_bytes((tmp_path / 'ids.npy').read_bytes())
    for given in (tmp_path, tmp_path / 'nested' / name):
        with pytest.raises(InputError, match=f'{name} describes tokens, by its name'):
            find_inputs([given])
    assert len(find_inputs([tmp_path], exclude=[name])) == 1
