import pytest

from maxlm.data.documents.document import Document
from maxlm.data.filters.base import FilterResult


@pytest.fixture
def judge():
    """What a filter says of a text: None for a text that is kept as it is, the reason of a removal, or what is left."""

    def judge(judged_by, text, name='x.txt', **metadata):
        verdict = judged_by(Document(name, 'in', text, metadata=metadata))
        if isinstance(verdict, FilterResult):
            return verdict.reason
        return None if verdict.text == text else verdict.text

    return judge
