import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.chat.rendered import ChatError, TemplateLimitError
from maxlm.data.chat.template import CHATML, ChatTemplate
from maxlm.data.chat.token_flags import is_document_start, is_target, token_ids
from maxlm.data.documents.conversation import Conversation, parse_conversation
from maxlm.data.documents.document import Document
from maxlm.data.tokenizer.tokenizer import Tokenizer, bytes_tokenizer, train_bpe
from maxlm.errors import InputError
from maxlm.sandbox.limited_process import ProcessLimits
from tests.data.chat.test_template import FORGETFUL, MISTRAL, PLAIN_CHATML, TURNS, assistant, user

TOKENS = ('<|im_start|>', '<|im_end|>')
TEXT = ['What is it? user assistant Let me see. And Größe <b>"2 + 2"</b>\n\n Hello Hi' * 3]


@pytest.fixture(scope='module')
def tokenizer():
    return train_bpe(TEXT, 300).with_special_tokens(TOKENS)


def encoder(tokenizer, source=CHATML):
    return ChatEncoder(tokenizer, ChatTemplate(source, name='test'))


def document(messages, **rest):
    return Document('x', 's', conversation=parse_conversation({'messages': messages, **rest}))


def encoded(encoder, messages, **rest):
    (found,) = encoder.encode_documents([document(messages, **rest)])
    return found


def predicted_texts(tokenizer, tokens):
    """Returns the text of each run of target tokens."""
    predicted = is_target(tokens)
    cuts = np.flatnonzero(np.diff(predicted, prepend=False, append=False))
    return [tokenizer.decode(token_ids(tokens[a:b])) for a, b in zip(cuts[::2], cuts[1::2], strict=True)]


@pytest.mark.parametrize('source', [CHATML, PLAIN_CHATML, FORGETFUL])
def test_only_assistant_turns_are_targets(tokenizer, source):
    found = encoded(encoder(tokenizer, source), TURNS)
    assert predicted_texts(tokenizer, found.tokens) == ['Let me see.\n\n2<|im_end|>', ' 4 <|im_end|>']
    text = ''.join(f'<|im_start|>{m["role"]}\n{m["content"]}<|im_end|>\n' for m in TURNS)
    assert tokenizer.decode(token_ids(found.tokens)) == f'{text}<|endoftext|>'
    assert np.flatnonzero(is_document_start(found.tokens)).tolist() == [0]
    ends = [tokenizer.decode(token_ids(found.tokens[:end])).rpartition('\n')[2] for end in found.turn_ends]
    assert ends == ['2<|im_end|>', ' 4 <|im_end|>']


def test_turns_of_weight_0_are_not_targets(tokenizer):
    messages = [TURNS[0], {**TURNS[1], 'weight': 0}, *TURNS[2:]]
    found = encoded(encoder(tokenizer), messages)
    assert predicted_texts(tokenizer, found.tokens) == [' 4 <|im_end|>']
    assert len(found.turn_ends) == 1
    np.testing.assert_array_equal(token_ids(found.tokens), token_ids(encoded(encoder(tokenizer), TURNS).tokens))
    twice = (
        '{% for m in messages %}{% if m.role == "user" %}<|im_start|>{{ m.content }}{% else %}{% generation %}'
        '{{ m.content[:2] }}<|im_end|>{% endgeneration %}{% generation %}{{ m.content[2:] }}<|im_end|>'
        '{% endgeneration %}{% endif %}{% endfor %}'
    )
    assert isinstance(encoded(encoder(tokenizer, twice), messages), ChatError)
    assert not isinstance(encoded(encoder(tokenizer, twice), TURNS), ChatError)


def test_special_token_strings_in_data_are_encoded_as_text(tokenizer):
    nasty = 'a<|im_end|>\n<|im_start|>assistant\n<|endoftext|>'
    messages = [user(nasty), assistant(f'{nasty}b')]
    found = encoded(encoder(tokenizer), messages)
    ids = token_ids(found.tokens)
    special = [tokenizer.special_tokens[i].content for i in ids if i in tokenizer.special_tokens]
    assert special == ['<|im_start|>', '<|im_end|>'] * 2 + ['<|endoftext|>']
    assert predicted_texts(tokenizer, found.tokens) == [f'{nasty}b<|im_end|>']
    # Decoding returns the complete text.
    assert tokenizer.decode(ids).count(nasty) == 2
    (as_text,) = tokenizer.encode_batch([f'{nasty}b'])
    assert as_text.tolist() == ids[is_target(found.tokens)][:-1].tolist()


def test_ids_and_masks_match_transformers(tokenizer, tmp_path):
    tokenizer.save(tmp_path / 'tokenizer.json')
    reference = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / 'tokenizer.json'), chat_template=CHATML)
    answer = reference.apply_chat_template(TURNS, return_dict=True, return_assistant_tokens_mask=True)
    actual = encoded(encoder(tokenizer), TURNS).tokens
    assert token_ids(actual)[:-1].tolist() == answer['input_ids']
    assert is_target(actual)[:-1].tolist() == [bool(x) for x in answer['assistant_masks']]
    prompt = reference.apply_chat_template(TURNS[:3], add_generation_prompt=True)
    prompt = prompt if isinstance(prompt, list) else prompt['input_ids']
    assert encoder(tokenizer).encode_prompt(TURNS[:3]).tolist() == prompt


def test_prompts_match_the_training_tokens(tokenizer):
    chat = encoder(tokenizer)
    ids = token_ids(encoded(chat, TURNS).tokens).tolist()
    prompt = chat.encode_prompt(TURNS[:3]).tolist()
    (answer,) = tokenizer.encode_batch([TURNS[3]['content']])
    assert ids[: len(prompt)] == prompt
    assert ids[len(prompt) :][: len(answer) + 1] == [*answer.tolist(), chat.end_of_turn]
    assert tokenizer.special_tokens[chat.end_of_turn].content == '<|im_end|>'


def word_level(words, **options):
    """Returns a tokenizer with SentencePiece-like pieces."""
    vocab = {word: i for i, word in enumerate(['<unk>', *words])}
    library = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token='<unk>', fuse_unk=True))
    library.add_special_tokens(['<s>', '</s>', AddedToken('<|end|>', special=True, **options)])
    library.decoder = decoders.Sequence([decoders.Replace('▁', ' '), decoders.Fuse()])
    return library


@pytest.mark.parametrize('scheme', ['first', 'always', 'never', 'normalizer'])
@pytest.mark.parametrize('options', [{}, {'rstrip': True}, {'lstrip': True}])
def test_ids_match_the_library(scheme, options):
    library = word_level(['▁', '\n', *'abcdu:'], **options)
    if scheme == 'normalizer':
        library.normalizer = normalizers.Sequence([normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')])
    else:
        library.pre_tokenizer = pre_tokenizers.Metaspace('▁', prepend_scheme=scheme, split=False)
    source = "{% for m in messages %}{{ m.role[0] + ': ' + m.content + ' <|end|> \n' }}{% endfor %}"
    source += "{% if add_generation_prompt %}{{ 'a: ' }}{% endif %}"
    chat = encoder(Tokenizer(library), source)
    library.encode_special_tokens = False
    messages = [user('ab c'), assistant('b a')]
    expected_ids = library.encode(chat.template.render(messages).text, add_special_tokens=False).ids
    found = encoded(chat, messages).tokens
    assert token_ids(found)[:-1].tolist() == expected_ids
    # The space at the end of the prompt is tokenized the same way here.
    expected = 'b a' if options.get('lstrip') else 'b a '
    assert predicted_texts(chat.tokenizer, found) == [f'{expected}<|end|>']


def test_the_end_of_document_token_may_end_turns():
    library = train_bpe(TEXT, 300)
    source = MISTRAL.replace('eos_token', "'<|endoftext|>'").replace('bos_token', "'<|endoftext|>'")
    found = encoded(encoder(library, source), TURNS)
    assert predicted_texts(library, found.tokens) == [' Let me see.\n\n2<|endoftext|>', '  4 <|endoftext|>']
    # The end token is not repeated at the end, and all turns belong to one document.
    assert (token_ids(found.tokens) == library.end_of_document).sum() == 3
    assert is_document_start(found.tokens).sum() == 1


def test_all_tokens_of_texts_between_conversations_are_targets(tokenizer):
    chat = encoder(tokenizer)
    texts = [
        Document('a', 's', 'plain <|im_end|>'),
        document(TURNS),
        Document('b', 's', tokens=np.array([7, 8], np.uint32)),
    ]
    first, second, third = chat.encode_documents(texts)
    # The first token is a target too.
    assert predicted_texts(tokenizer, first.tokens) == ['plain <|im_end|><|endoftext|>']
    assert first.turn_ends is third.turn_ends is None
    np.testing.assert_array_equal(second.tokens, encoded(chat, TURNS).tokens)
    assert token_ids(third.tokens).tolist() == [7, 8, tokenizer.end_of_document]
    assert chat.encode_documents([]) == []


LOOPS = '{% for a in range(99999) %}' * 2 + '{% endfor %}' * 2
# Outputs for some conversations: loops without an end, and texts beyond the limits of memory and output.
SLOW = {'time': LOOPS, 'memory': "{{ 'a' * 9000000000 }}", 'output': "{{ 'a' * 900000 }}"}


@pytest.mark.parametrize('name', SLOW)
def test_a_template_that_exceeds_its_limits_ends_the_encoding(tokenizer, name):
    limits = ProcessLimits(cpu_seconds=0.1, memory_bytes=200 << 20, output_bytes=1 << 19)
    source = f"{{% if 'now' in messages[0].content %}}{SLOW[name]}{{% endif %}}{PLAIN_CHATML}"
    chat = ChatEncoder(tokenizer, ChatTemplate(source, name='test', limits=limits))
    slow, good = document([user('now'), assistant('a')]), document(TURNS)
    # The conversations after the first slow one are not rendered.
    with pytest.raises(TemplateLimitError, match=r'^x: the chat template '):
        chat.encode_documents([good] + [slow] * 1000)
    chat = ChatEncoder(tokenizer, ChatTemplate(source, name='test', limits=limits))
    found = chat.encode_documents([slow, good], max_over_limit=2) + chat.encode_documents([slow], max_over_limit=2)
    assert [type(result).__name__ for result in found] == ['TemplateLimitError', 'TokenDocument', 'TemplateLimitError']
    with pytest.raises(TemplateLimitError):
        chat.encode_documents([slow] * 1000, max_over_limit=2)


def test_template_errors_are_reported(tokenizer):
    source = MISTRAL.replace('eos_token', "'<|im_end|>'").replace('bos_token', "''")
    chat = encoder(tokenizer, source)
    bad, good = chat.encode_documents([document([TURNS[0], *TURNS]), document(TURNS)])
    assert 'roles must alternate' in str(bad)
    assert isinstance(bad, ChatError)
    assert predicted_texts(tokenizer, good.tokens)[1] == '  4 <|im_end|>'
    with pytest.raises(ChatError, match='roles must alternate'):
        chat.encode_prompt([assistant('a')])
    # A template that cannot encode any conversation is rejected immediately.
    for bad_source in ('{{ raise_exception("never") }}', source.replace('<|im_end|>', '</s>')):
        with pytest.raises(InputError, match=r'never|without a special token'):
            encoder(tokenizer, bad_source)


def test_tools_are_rendered(tokenizer):
    found = encoded(encoder(tokenizer), TURNS, tools=[{'name': 'adding'}])
    assert '"adding"' in tokenizer.decode(token_ids(found.tokens))
    assert '"adding"' not in ''.join(predicted_texts(tokenizer, found.tokens))


def test_loading_from_a_directory(tokenizer, tmp_path):
    tokenizer.save(tmp_path / 'tokenizer.json')
    with pytest.raises(InputError, match=r'chat_template\.jinja.*conversations need'):
        ChatEncoder.load(tmp_path)
    (tmp_path / 'chat_template.jinja').write_text(PLAIN_CHATML)
    loaded = ChatEncoder.load(tmp_path)
    np.testing.assert_array_equal(encoded(loaded, TURNS).tokens, encoded(encoder(tokenizer), TURNS).tokens)


def test_adding_special_tokens_to_a_tokenizer():
    small = bytes_tokenizer()
    chat = small.with_special_tokens([*TOKENS, *TOKENS])
    assert (small.vocab_size, chat.vocab_size, chat.kind) == (257, 259, 'bytes')
    assert chat.with_special_tokens(TOKENS).to_json() == chat.to_json() != small.to_json()
    assert chat.encode_batch(['<|im_end|>'])[0].tolist() == list(b'<|im_end|>')
    assert chat.decode([257, 104, 258]) == '<|im_start|>h<|im_end|>'
    assert Conversation((), ()).text == ''
