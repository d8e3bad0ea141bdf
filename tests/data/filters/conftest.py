import pytest

from maxlm.data.documents.document import Document
from maxlm.data.filters.base import FilterResult


@pytest.fixture
def apply_filter():
    """Returns a function that filters a text: None if it is unchanged, the reason for removal, or the changed text."""

    def apply_filter(filter_function, text, name='x.txt', **metadata):
        result = filter_function(Document(name, 'in', text, metadata=metadata))
        if isinstance(result, FilterResult):
            return result.reason
        return None if result.text == text else result.text

    return apply_filter
