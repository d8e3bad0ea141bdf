"""Checks the English of docstrings, comments and documentation pages.

    python -m tools.check_prose [PATH …]

It reports docstrings that start with a question word, sentences of more than 28 words, banned words, and error messages
of maxlm/ without a remedy. Without paths it reads all tracked Python and Markdown files. The exit code is 1 if there
are findings.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

MAX_WORDS = 28
FIRST_WORDS = re.compile(r'(What|Who|Whether|Where|How|That|Whose|Whoever)\b')
BANNED = re.compile(
    r'\b(rooms?|houses?|homes?|life|lives|diary|wings?|verdicts?|judges?|tells?|told|minded|ahead of its use|turned|'
    r'apart|whoever|likewise|so many|that is there|what is there)\b',
    re.IGNORECASE,
)
# Standard terms that contain a banned word.
ALLOWED = re.compile(
    r'home\s+director(?:y|ies)|half a head apart|further apart|LLM judge|half-life|headroom', re.IGNORECASE
)
# Parts of a text that are not prose: code, tables, tags, targets of links, and legends of shapes.
CODE = re.compile(
    r'```.*?```|``[^`]*``|`[^`\n]*`|^\s*\|[^\n]*$|^ {4,}\S[^\n]*$|^[^\n]*\S {3,}\S[^\n]*$|<[^>]*>|\]\([^)]*\)|'
    r'^Shapes[^\n]*:.*?(?=\n\n|\Z)',
    re.DOTALL | re.MULTILINE,
)
SENTENCE_END = re.compile(r'(?<=[.!?:;])\s+|\n\s*\n|\n\s*[-*] |\n\s*\w+: ')

# Verbs of remedies, in the imperative.
VERBS = (
    'add|allow|change|check|choose|convert|copy|correct|create|define|delete|download|enable|export|fetch|finish|fix|free|give|'
    'grant|increase|install|leave|list|lower|make|merge|move|name|number|omit|override|pass|pip install|prepare|'
    'provide|prune|put|raise|reduce|remove|rename|replace|report|restart|restore|run|save|see|select|set|shorten|skip|split|'
    'start|stop|use|wait|write'
)
# A remedy is an imperative at the start of a clause, a constraint, or the valid values. It can also be a clause that is
# only a value, or the message of an error that has a remedy itself.
REMEDY = re.compile(
    rf'(?:[;:,.] |\(|\b(?:or|and) |^)(?:{VERBS})\b|'
    r'\b(?:must|requires?|needs?|can be|at least|at most|did you mean|expected|nearest|closest)\b|'
    r'\b(?:usage|supported|(?:available|known|valid)(?: \w+)?):|; \{\}(?=;|$)|(?<!\()\{error\}'
)
# Errors whose messages have a remedy.
WITH_REMEDY = {'InputError', 'UserRewardError', 'ValueError'}


def message_of(expression: ast.expr, caught: frozenset[str]) -> str:
    """Returns the text of a message, with `{}` for values and `{error}` for the errors named in `caught`."""
    match expression:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return ''.join(message_of(part, caught) for part in parts)
        case ast.FormattedValue(value=ast.IfExp(body=body, orelse=orelse)) | ast.IfExp(body=body, orelse=orelse):
            return f'{message_of(body, caught)} {message_of(orelse, caught)}'
        case ast.FormattedValue(value=ast.Name(id=name)) if name in caught:
            return '{error}'
    return '{}'


def errors_without_remedy(tree: ast.AST, caught: frozenset[str] = frozenset()) -> Iterator[tuple[int, str]]:
    """Yields line number and message of each InputError and ValueError that does not explain what to do."""
    for node in ast.iter_child_nodes(tree):
        names = caught
        match node:
            case ast.ExceptHandler(name=str(name), type=ast.expr() as kind):
                kinds = {ast.unparse(each) for each in (kind.elts if isinstance(kind, ast.Tuple) else [kind])}
                names = caught | {name} if kinds <= WITH_REMEDY else caught - {name}
            case ast.Raise(exc=ast.Call(func=ast.Name(id='InputError' | 'ValueError'), args=[first, *_])):
                # A message that is only a value was composed elsewhere.
                if (text := message_of(first, caught)) != '{}' and not REMEDY.search(text):
                    yield node.lineno, text
        yield from errors_without_remedy(node, names)


def comments_of(source: str) -> Iterator[tuple[int, str]]:
    """Yields line number and text of each comment; consecutive lines with nothing else are one comment."""
    start = 0
    lines: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, text = token.start[0], token.string.lstrip('# ')
        is_alone = token.line.lstrip().startswith('#')
        if lines and not (is_alone and line == start + len(lines)):
            yield start, '\n'.join(lines)
            lines = []
        if not is_alone:
            yield line, text
            continue
        if not lines:
            start = line
        lines.append(text)
    if lines:
        yield start, '\n'.join(lines)


def prose_of(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yields line number, text and whether it is a docstring, of every docstring and comment, or of a complete page."""
    source = path.read_text()
    if path.suffix != '.py':
        yield 1, source, False
        return
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if text := ast.get_docstring(node):
            yield node.body[0].lineno, text, True
    yield from ((line, text, False) for line, text in comments_of(source))


def findings(path: Path) -> Iterator[str]:
    """Yields one line for each finding in a file."""
    if path.suffix == '.py' and 'maxlm' in path.parts:
        for line, text in errors_without_remedy(ast.parse(path.read_text())):
            yield f'{path}:{line}: the error {text!r} has no remedy; add what to do, or the valid values'
    for line, text, is_docstring in prose_of(path):
        if is_docstring and FIRST_WORDS.match(text):
            yield f'{path}:{line}: starts with {text.split()[0]!r}; start with a verb or a noun phrase'
        # Blanks keep the positions of lines.
        prose = CODE.sub(lambda code: re.sub(r'[^\n]', ' ', code[0]), text)
        for match in BANNED.finditer(ALLOWED.sub(lambda allowed: ' ' * len(allowed[0]), prose)):
            number = line + prose.count('\n', 0, match.start())
            yield f'{path}:{number}: {match[0]!r} is not a term of the field; see CONTRIBUTING.md'
        for sentence in SENTENCE_END.split(prose):
            if (num_words := len(sentence.split())) > MAX_WORDS:
                yield f'{path}:{line}: a sentence of {num_words} words: {" ".join(sentence.split()[:8])} …; split it'


def main(arguments: list[str]) -> int:
    """Prints the findings of the given files and directories; returns the exit code."""
    if arguments:
        given = map(Path, arguments)
        paths = [file for path in given for file in (sorted(path.rglob('*')) if path.is_dir() else [path])]
    else:
        listed = subprocess.run(['git', 'ls-files'], capture_output=True, text=True, check=True).stdout
        paths = [Path(name) for name in listed.splitlines()]
    found = [line for path in paths if path.suffix in ('.py', '.md') for line in findings(path)]
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
