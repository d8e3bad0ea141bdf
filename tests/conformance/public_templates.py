"""Short chat templates with the structure of those of public models, for tests.

Each entry has the source, the token at the end of an assistant turn, and the rendered CONVERSATION. Its marks ⟦ and ⟧
enclose the turns of the assistant. `None` as the text: the end of a turn cannot be decided.
"""

from __future__ import annotations

import json
from typing import NamedTuple

CONVERSATION = (('user', 'hi'), ('assistant', 'yo'), ('user', 'ok?'), ('assistant', 'ok!'))
BOS, EOS = '<s>', '</s>'


class Public(NamedTuple):
    """A template, the end of its turns, and the expected text."""

    source: str
    end: str
    text: str | None


def _roles(user: str, assistant: str, prompt: str = '', *, begin: str = '', end: str = '', system: str = '') -> str:
    """Returns a template that concatenates messages. `@` stands for the content, and ~ for the trimmed content."""

    def message(pattern: str) -> str:
        expression = json.dumps(pattern, ensure_ascii=False)
        return expression.replace('@', '" + m.content + "').replace('~', '" + m.content | trim + "')

    branches = [('user', user), ('assistant', assistant), ('system', system or user)]
    body = ''.join(
        f'{{% if m.role == "{role}" %}}{{{{ {message(pattern)} }}}}{{% endif %}}' for role, pattern in branches
    )
    begin, prompt, end = (json.dumps(text, ensure_ascii=False) for text in (begin, prompt, end))
    return (
        f'{{{{ {begin} }}}}{{% for m in messages %}}{body}{{% endfor %}}'
        f'{{% if add_generation_prompt %}}{{{{ {prompt} }}}}{{% else %}}{{{{ {end} }}}}{{% endif %}}'
    )


def _chatml(*, begin: str = '', content: str = 'm.content', prompt: str = '') -> str:
    return (
        f"{begin}{{% for m in messages %}}{{{{ '<|im_start|>' + m.role + '\\n' + {content} + '<|im_end|>\\n' }}}}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{{{{ '<|im_start|>assistant\\n{prompt}' }}}}{{% endif %}}"
    )


# Removes reasoning.
_ANSWER = "(m.content.split('</think>')[-1].lstrip('\\n') if m.role == 'assistant' else m.content)"
_QWEN3 = (
    '{% set ns = namespace(query=0) %}{% for m in messages %}'
    "{% if m.role == 'user' %}{% set ns.query = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}{% set think = '' %}{% set text = m.content %}"
    "{% if m.reasoning_content is string %}{% set think = m.reasoning_content %}{% elif '</think>' in text %}"
    "{% set think = text.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{% set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}{% if loop.index0 > ns.query %}"
    "{{ '<think>\\n' + think + '\\n</think>\\n\\n' }}{% endif %}{{ text }}{% else %}{{ m.content }}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    '{% endif %}'
)
_MISTRAL = (
    "{{ bos_token }}{% set ns = namespace(last=0, system='') %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% elif m.role == 'system' %}{% set ns.system = m.content + '\\n\\n' %}{% endif %}"
    "{% endfor %}{% for m in messages %}{% if m.role == 'user' %}{% if loop.index0 == ns.last %}"
    "{{ '[AVAILABLE_TOOLS][][/AVAILABLE_TOOLS][INST]' + ns.system + m.content + '[/INST]' }}{% else %}"
    "{{ '[INST]' + m.content + '[/INST]' }}{% endif %}{% elif m.role == 'assistant' %}"
    '{{ m.content + eos_token }}{% endif %}{% endfor %}'
)
_LLAMA2 = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if m.role == 'user' %}"
    "{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}{% else %}"
    "{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
_OLMO = (
    "{{ '<|endoftext|>' }}{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>\\n' + m.content }}"
    "{% if not loop.last %}{{ '<|endoftext|>\\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}{% else %}"
    "{{ '<|' + m.role + '|>\\n' + m.content + '\\n' }}{% endif %}{% if loop.last and add_generation_prompt %}"
    "{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}"
)
_HARMONY = (
    "{{ '<|start|>system<|message|>Date: 2025<|end|>' }}{% for m in messages %}{% if m.role == 'assistant' %}"
    '{% if loop.last and not add_generation_prompt %}{% if m.thinking %}'
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}{% else %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endif %}{% else %}"
    "{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
_DBRX = (
    "{% for m in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}{% if loop.last and add_generation_prompt %}"
    "{{ '\\n<|im_start|>assistant\\n' }}{% endif %}{% endfor %}"
)
_R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% else %}"
    "{{ '<｜User｜>' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"
)
_GEMMA = (
    "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role)"
    " + '\\n' + m.content | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
_IM = '<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦yo<|im_end|>⟧\n'
_IM += '<|im_start|>user\nok?<|im_end|>\n<|im_start|>assistant\n⟦ok!<|im_end|>⟧\n'
_LLAMA3_HEAD = '<|start_header_id|>{}<|end_header_id|>\n\n'
_L3_USER, _L3 = (_LLAMA3_HEAD.format(role) for role in ('user', 'assistant'))
_CO = '<|START_OF_TURN_TOKEN|>'
_DS = '<｜end▁of▁sentence｜>'


def _twice(user: str, assistant: str, begin: str = '', end: str = '') -> str:
    """Returns the text of CONVERSATION in a template with these patterns."""
    turns = [
        user.replace('@', 'hi'),
        assistant.replace('@', 'yo'),
        user.replace('@', 'ok?'),
        assistant.replace('@', 'ok!'),
    ]
    return begin + ''.join(turns) + end


def _simple(
    user: str, header: str, closing: str, after: str = '', *, begin: str = '', end: str = '', content: str = '@'
) -> Public:
    """Returns a template whose turns are header, content, closing token and `after`."""
    source = _roles(user, f'{header}{content}{closing}{after}', header, begin=begin, end=end)
    text = _twice(user.replace('~', '@'), f'{header}⟦@{closing}⟧{after}', begin, end)
    return Public(source, closing.strip(), text)


PUBLIC = {
    'phi-3': _simple('<|user|>\n@<|end|>\n', '<|assistant|>\n', '<|end|>', '\n', end='<|endoftext|>'),
    'phi-4-mini': _simple('<|user|>@<|end|>', '<|assistant|>', '<|end|>', end='<|endoftext|>'),
    'phi-4': _simple('<|im_start|>user<|im_sep|>@<|im_end|>', '<|im_start|>assistant<|im_sep|>', '<|im_end|>'),
    'llama-2': Public(_LLAMA2, EOS, _twice('<s>[INST] @ [/INST]', '⟦ @ </s>⟧')),
    'llama-3': _simple(f'{_L3_USER}~<|eot_id|>', _L3, '<|eot_id|>', begin='<|begin_of_text|>', content='~'),
    'llama-4': _simple(
        '<|header_start|>user<|header_end|>\n\n~<|eot|>', '<|header_start|>assistant<|header_end|>\n\n', '<|eot|>'
    ),
    'mistral-v1': _simple('[INST] @ [/INST]', '', EOS, begin=BOS),
    'mistral-v3': Public(
        _MISTRAL, EOS, '<s>[INST]hi[/INST]⟦yo</s>⟧[AVAILABLE_TOOLS][][/AVAILABLE_TOOLS][INST]ok?[/INST]⟦ok!</s>⟧'
    ),
    'zephyr': _simple('<|user|>\n@</s>\n', '<|assistant|>\n', EOS, '\n'),
    'vicuna': _simple('USER: @ ', 'ASSISTANT: ', EOS, begin='A chat. '),
    'falcon': _simple('User: @\n\n', 'Falcon: ', '<|endoftext|>', '\n'),
    'chatml': Public(_chatml(), '<|im_end|>', _IM),
    'internlm2': Public(_chatml(begin='{{ bos_token }}'), '<|im_end|>', BOS + _IM),
    'qwen2.5': Public(
        _chatml(begin="{{ '<|im_start|>system\\nBe Qwen.<|im_end|>\\n' if messages[0].role != 'system' }}"),
        '<|im_end|>',
        '<|im_start|>system\nBe Qwen.<|im_end|>\n' + _IM,
    ),
    'qwen3': Public(_QWEN3, '<|im_end|>', _IM.replace('⟦ok!', '⟦<think>\n\n</think>\n\nok!')),
    'qwq': Public(_chatml(content=_ANSWER, prompt='<think>\\n'), '<|im_end|>', _IM),
    'dbrx': Public(_DBRX, '<|im_end|>', _IM.removesuffix('\n')),
    'gemma': Public(
        _GEMMA,
        '<end_of_turn>',
        _twice('<start_of_turn>user\n@<end_of_turn>\n', '<start_of_turn>model\n⟦@<end_of_turn>⟧\n', BOS),
    ),
    'command-r': _simple(
        f'{_CO}<|USER_TOKEN|>~<|END_OF_TURN_TOKEN|>', f'{_CO}<|CHATBOT_TOKEN|>', '<|END_OF_TURN_TOKEN|>', begin=BOS
    ),
    'command-r7b': Public(
        _roles(
            f'{_CO}<|USER_TOKEN|>@<|END_OF_TURN_TOKEN|>',
            f'{_CO}<|CHATBOT_TOKEN|><|START_RESPONSE|>@<|END_RESPONSE|><|END_OF_TURN_TOKEN|>',
            f'{_CO}<|CHATBOT_TOKEN|>',
        ),
        '<|END_OF_TURN_TOKEN|>',
        _twice(
            f'{_CO}<|USER_TOKEN|>@<|END_OF_TURN_TOKEN|>',
            f'{_CO}<|CHATBOT_TOKEN|>⟦<|START_RESPONSE|>@<|END_RESPONSE|><|END_OF_TURN_TOKEN|>⟧',
        ),
    ),
    'olmo': Public(
        _OLMO,
        '<|endoftext|>',
        '<|endoftext|><|user|>\nhi\n<|assistant|>\n⟦yo<|endoftext|>⟧\n<|user|>\nok?\n<|assistant|>\n⟦ok!<|endoftext|>⟧',
    ),
    'granite': _simple(
        '<|start_of_role|>user<|end_of_role|>@<|end_of_text|>\n',
        '<|start_of_role|>assistant<|end_of_role|>',
        '<|end_of_text|>',
        '\n',
    ),
    'deepseek-v2': _simple('User: @\n\n', 'Assistant: ', _DS, begin=BOS),
    'deepseek-v3': _simple('<｜User｜>@', '<｜Assistant｜>', _DS, begin=BOS),
    'deepseek-r1': Public(_R1, _DS, _twice('<｜User｜>@', f'<｜Assistant｜>⟦@{_DS}⟧', BOS)),
    'minicpm': _simple('<用户>@', '<AI>', EOS, begin=BOS),
    'starcoder': _simple('<|user|>\n@<|end|>\n', '<|assistant|>\n', '<|end|>', '\n', begin='<|system|>\n<|end|>\n'),
    'gpt-oss': Public(
        _HARMONY,
        '<|return|>',
        _twice(
            '<|start|>user<|message|>@<|end|>',
            '<|start|>assistant⟦<|channel|>final<|message|>@<|end|>⟧',
            '<|start|>system<|message|>Date: 2025<|end|>',
        ).replace('ok!<|end|>', 'ok!<|return|>'),
    ),
    'exaone': _simple('[|user|]@\n', '[|assistant|]', '[|endofturn|]', '\n'),
    'hunyuan': _simple('<|hy_User|>@', '<|hy_Assistant|>', '<|hy_2|>', begin='<|hy_begin|>', end='<|hy_end|>'),
    'jamba': _simple('<|bom|><|user|> @<|eom|>', '<|bom|><|assistant|> ', '<|eom|>', begin='<|startoftext|>'),
    'nanochat': _simple('<|user_start|>@<|user_end|>', '<|assistant_start|>', '<|assistant_end|>', begin='<|bos|>'),
    'openchat': _simple(
        'GPT4 Correct User: @<|end_of_turn|>', 'GPT4 Correct Assistant: ', '<|end_of_turn|>', begin=BOS
    ),
    'solar': _simple('### User:\n@\n\n', '### Assistant:\n', EOS, '\n\n'),
    # The token that ends a turn begins the next message.
    'glm-4': Public(_roles('<|user|>\n@', '<|assistant|>\n@', '<|assistant|>', begin='[gMASK]<sop>'), '', None),
    'glm-4 with an end': Public(
        _roles('<|user|>\n@', '<|assistant|>\n@', '<|assistant|>', end='<|endoftext|>'), '<|endoftext|>', None
    ),
    'nemotron-mini': Public(
        _roles('<extra_id_1>User\n@\n', '<extra_id_1>Assistant\n@\n', '<extra_id_1>Assistant\n'), '', None
    ),
}
# Special tokens of all templates, in one tokenizer.
# fmt: off
SPECIAL = (
    '<s>', '</s>', '<|end|>', '<|endoftext|>', '<|user|>', '<|assistant|>', '<|system|>', '<|im_start|>',
    '<|im_end|>', '<|im_sep|>', '[INST]', '[/INST]', '<|begin_of_text|>', '<|start_header_id|>', '<|end_header_id|>',
    '<|eot_id|>', '<|header_start|>', '<|header_end|>', '<|eot|>', '[AVAILABLE_TOOLS]', '[/AVAILABLE_TOOLS]',
    '<start_of_turn>', '<end_of_turn>', '<|START_OF_TURN_TOKEN|>', '<|USER_TOKEN|>', '<|CHATBOT_TOKEN|>',
    '<|END_OF_TURN_TOKEN|>', '<|START_RESPONSE|>', '<|END_RESPONSE|>', '<|start_of_role|>', '<|end_of_role|>',
    '<|end_of_text|>', '<｜end▁of▁sentence｜>', '<｜User｜>', '<｜Assistant｜>', '<|start|>', '<|message|>',
    '<|channel|>', '<|return|>', '[|user|]', '[|assistant|]', '[|endofturn|]', '<|hy_User|>', '<|hy_Assistant|>',
    '<|hy_2|>', '<|hy_begin|>', '<|hy_end|>', '<|bom|>', '<|eom|>', '<|startoftext|>', '<|user_start|>', '<|user_end|>',
    '<|assistant_start|>', '<|assistant_end|>', '<|bos|>', '<|end_of_turn|>', '[gMASK]', '<sop>', '<extra_id_1>',
)
# fmt: on
