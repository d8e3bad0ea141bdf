"""API reference: the OpenAPI document as one HTML page without scripts."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from maxlm.serving.pages.html_page import HtmlPage

_FOLDER = Path(__file__).parent / 'reference'


def api_reference(document: dict[str, Any]) -> HtmlPage:
    """Returns the page of an OpenAPI document."""
    schemas = document['components']['schemas']
    operations = [
        (path, method, operation)
        for path, methods in document['paths'].items()
        for method, operation in methods.items()
    ]
    links = ''.join(f'<li><a href="#{_anchor(path)}">{_escape(path)}</a></li>' for path, _, _ in operations)
    sections = ''.join(_section(path, method, operation, schemas) for path, method, operation in operations)
    text = (_FOLDER / 'page.html').read_text(encoding='utf-8')
    values = {
        'title': f'{document["info"]["title"]} {document["info"]["version"]}',
        'description': document['info']['description'],
    }
    for name, value in values.items():
        text = text.replace(f'<!-- {name} -->', _escape(value))
    text = text.replace('<!-- links -->', links).replace('<!-- sections -->', sections)
    return HtmlPage(text, style=(_FOLDER / 'style.css').read_text(encoding='utf-8'))


def _section(path: str, method: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    parts = [
        f'<section id="{_anchor(path)}"><h2><span>{method.upper()}</span> {_escape(path)}</h2>',
        f'<p>{_escape(operation["summary"])}</p>',
    ]
    command = f'curl http://127.0.0.1:8000{path}'
    if 'requestBody' in operation:
        content = operation['requestBody']['content']['application/json']
        parts.append(_table(_resolved(content['schema'], schemas), schemas))
        body = json.dumps(content['example'], ensure_ascii=False)
        command += f" \\\n  -H 'Content-Type: application/json' \\\n  -d '{body}'"
    parts.append(f'<h3>Example</h3>{_code(command)}<h3>Response</h3>')
    for content in operation['responses']['200']['content'].values():
        if (example := content.get('example')) is None:
            parts.append(f'<p>{_escape(content["schema"]["description"])}</p>')
        else:
            parts.append(
                _code(example if isinstance(example, str) else json.dumps(example, indent=2, ensure_ascii=False))
            )
    return f'{"".join(parts)}</section>'


def _table(schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    required = schema.get('required', [])
    rows = ''.join(
        f'<tr><th scope="row"><code>{_escape(name)}</code>{" <b>required</b>" if name in required else ""}</th>'
        f'<td>{_escape(_type_text(field, schemas))}</td><td>{_escape(field.get("description", ""))}</td></tr>'
        for name, field in schema['properties'].items()
    )
    head = ''.join(f'<th scope="col">{name}</th>' for name in ('Parameter', 'Type', 'Description'))
    return f'<div class="table" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _type_text(schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    """Returns the type and range of a field as text."""
    if '$ref' in schema:
        fields = ', '.join(_resolved(schema, schemas)['properties'])
        return f'object with {fields}'
    if 'anyOf' in schema:
        return ' or '.join(_type_text(one, schemas) for one in schema['anyOf'] if one.get('type') != 'null')
    if 'const' in schema or 'enum' in schema:
        return ' or '.join(json.dumps(value) for value in schema.get('enum', [schema.get('const')]))
    if schema.get('type') == 'array':
        return f'array of {_type_text(schema["items"], schemas)}'
    lower = 'minimum' if 'minimum' in schema else 'exclusiveMinimum'
    ends = [
        f'{word} {schema[name]:g}' if isinstance(schema[name], float) else f'{word} {schema[name]}'
        for name, word in ((lower, 'above' if lower == 'exclusiveMinimum' else 'from'), ('maximum', 'to'))
        if name in schema
    ]
    return ' '.join([str(schema.get('type', 'any')), *ends])


def _resolved(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    return schemas[schema['$ref'].rpartition('/')[2]] if '$ref' in schema else schema


def _anchor(path: str) -> str:
    return path.strip('/').replace('/', '-').replace('.', '-')


def _code(text: str) -> str:
    return f'<pre tabindex="0"><code>{_escape(text)}</code></pre>'


def _escape(text: str) -> str:
    return html.escape(text)
