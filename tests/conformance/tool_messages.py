"""Messages with tool calls, and their text in training, in the server and in Transformers."""

import json
from types import SimpleNamespace

from transformers.utils.chat_template_utils import render_jinja_template

from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.chat.template import CHATML, ChatTemplate
from maxlm.data.chat.token_flags import token_ids
from maxlm.data.documents.conversation import parse_conversation
from maxlm.data.documents.document import Document
from maxlm.data.tokenizer.tokenizer import bytes_tokenizer
from maxlm.serving.request_parsing import ServedModel, conversation_ids
from maxlm.serving.schema.generation import parse_chat

TOKENIZER = bytes_tokenizer().with_special_tokens(['<|im_start|>', '<|im_end|>'])
CHAT = ChatEncoder(TOKENIZER, ChatTemplate(CHATML, name='test'))
SERVED = ServedModel('m', 0, TOKENIZER, CHAT, SimpleNamespace(max_context=100_000), None)
MODEL = SimpleNamespace(chat=CHAT)
ASK, DONE = {'role': 'user', 'content': 'Weather in Oslo?'}, {'role': 'assistant', 'content': 'Rain.'}


def wrapped(name, arguments, **rest):
    return {**rest, 'type': 'function', 'function': {'name': name, 'arguments': arguments}}


def called(*calls, content=''):
    return {'role': 'assistant', 'content': content, 'tool_calls': list(calls)}


def calling(arguments):
    return {'role': 'assistant', 'content': None, 'tool_calls': [wrapped('w', arguments)]}


def result(content):
    return {'role': 'tool', 'content': content}


def in_api(message):
    """Returns a message with the arguments of its calls as text, as OpenAI's API writes them."""
    calls = [
        wrapped(call['function']['name'], json.dumps(call['function']['arguments']), **call)
        for call in message.get('tool_calls', ())
    ]
    return {**message, 'tool_calls': calls}


OSLO = wrapped('w', {'city': 'Oslo'})
CALLED, EMPTY = called(OSLO), called(wrapped('w', {}))
BOTH = [{'name': 'w', 'arguments': {'city': 'Oslo'}}, {'name': 'v', 'arguments': {}}]


WEATHER = {
    'name': 'w',
    'description': 'Forecast',
    'parameters': {'type': 'object', 'properties': {'city': {'type': 'string', 'enum': ['Oslo', None]}}},
}
TOOL = {'type': 'function', 'function': WEATHER}


def encoded(record):
    """Returns the text of a record's tokens as SFT trains it."""
    document = Document('x', 's', conversation=parse_conversation(record))
    (found,) = CHAT.encode_documents([document])
    return TOKENIZER.decode(token_ids(found.tokens))


def served(messages, model=SERVED):
    """Returns the text of the tokens of a request to the server."""
    request = parse_chat(json.dumps({'messages': messages}).encode(), max_context=1000)
    return TOKENIZER.decode(conversation_ids(request.messages, model)[0])


def transformers_text(messages, tools=None, *, template=CHATML, add_generation_prompt=False):
    (text,), _ = render_jinja_template(
        [messages], tools=tools, chat_template=template, add_generation_prompt=add_generation_prompt
    )
    return text
