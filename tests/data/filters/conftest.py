import pytest

from maxlm.data.documents.document import Document
from maxlm.data.filters.base import FilterResult


@pytest.fixture
def judge():
    """Returns a function that filters a text: None if it is unchanged, the reason for removal, or the changed text."""

    def judge(judged_by, text, name='x.txt', **metadata):
        verdict = judged_by(Document(name, 'in', text, metadata=metadata))
        if isinstance(verdict, FilterResult):
            return verdict.reason
        return None if verdict.text == text else verdict.text

    return judge
