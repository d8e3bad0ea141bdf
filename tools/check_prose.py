"""Checks the English of docstrings, comments and documentation pages.

    python -m tools.check_prose [PATH …]

It reports docstrings that start with a question word, sentences of more than 35 words, and banned words. Without paths
it reads all tracked Python and Markdown files. The exit code is 1 if there are findings.
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

MAX_WORDS = 35
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
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip('# '), False


def findings(path: Path) -> Iterator[str]:
    """Yields one line for each finding in a file."""
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
