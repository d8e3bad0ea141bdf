"""Changes steps of a `tokenizer.json` so that they put no space before a text."""

from __future__ import annotations

from typing import Any


def without_leading_space(node: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns a normalizer or pre-tokenizer of `tokenizer.json` changed to put no space before a text."""
    kind = node and node['type']
    if node is None or kind == 'Prepend':
        return None
    if kind == 'Sequence':
        key = 'normalizers' if 'normalizers' in node else 'pretokenizers'
        return {**node, key: [bare for step in node[key] if (bare := without_leading_space(step))]}
    if kind == 'Metaspace':
        return {**node, 'prepend_scheme': 'never'}
    if kind == 'ByteLevel':
        return {**node, 'add_prefix_space': False}
    return node


def without_first_space(node: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns a normalizer or pre-tokenizer without the space before the first text, if only the first text gets it."""
    if node is not None and node['type'] == 'Sequence' and 'pretokenizers' in node:
        return {**node, 'pretokenizers': [without_first_space(step) for step in node['pretokenizers']]}
    return without_leading_space(node) if node is not None and node.get('prepend_scheme') == 'first' else node
