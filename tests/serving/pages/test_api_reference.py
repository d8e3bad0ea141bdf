"""Tests the OpenAPI document and the API reference, which are served with --docs."""

import re

import httpx
import pytest
from openapi_spec_validator import validate

from maxlm.serving.pages.api_reference import api_reference
from maxlm.serving.schema.paths import COMPLETION_PATHS, DOCS, OPENAPI, PAGE, PATHS, PUBLIC_PATHS
from tests.serving.fake_engine import FakeEngine, served_by
from tests.serving.serving_thread import ServerThread


def served_document(served):
    """Returns the OpenAPI document of a server."""
    with ServerThread(served, docs=True) as server:
        return httpx.get(f'{server.url}{OPENAPI}').json()


@pytest.fixture(scope='module')
def document():
    return served_document(served_by(FakeEngine()))


def test_the_document_is_valid_and_complete(document):
    validate(document)
    # The pages are for people.
    assert {*document['paths'], PAGE, OPENAPI, DOCS} == {*PATHS}
    for name, schema in document['components']['schemas'].items():
        for field, values in schema['properties'].items():
            assert values.get('description'), (name, field)
    secured = {path for path, methods in document['paths'].items() if 'security' in next(iter(methods.values()))}
    assert secured == {*document['paths']} - {*PUBLIC_PATHS}
    # Control: the validation detects errors.
    with pytest.raises(Exception, match='paths'):
        validate(document | {'paths': 5})


def test_examples_are_accepted_and_documented_responses_have_the_fields_of_real_ones(document):
    errors = document['components']['schemas']['ErrorDetail']['properties']
    # /tokenizer_info requires the option.
    with ServerThread(served_by(FakeEngine(), parse_special=True)) as server:
        for path, methods in document['paths'].items():
            ((method, operation),) = methods.items()
            contents = operation['responses']['200']['content']
            media_type, content = next(iter(contents.items()))
            if method == 'post':
                example = operation['requestBody']['content']['application/json']['example']
                # The example of ids is not in the vocabulary of bytes.
                example |= {'tokens': [39]} if 'tokens' in example else {}
                answer = httpx.post(f'{server.url}{path}', json=example)
                refused = httpx.post(f'{server.url}{path}', json={})
                assert refused.json().keys() == {'error'}
                assert refused.json()['error'].keys() == errors.keys()
                streamed = httpx.post(f'{server.url}{path}', json=example | {'stream': True})
                assert streamed.headers['content-type'].partition(';')[0] == [*contents][-1], path
            else:
                answer = httpx.get(f'{server.url}{path}')
            assert answer.status_code == 200, (path, answer.text)
            assert answer.headers['content-type'].partition(';')[0] == media_type
            if isinstance(content['example'], dict):
                assert content['example'].keys() <= answer.json().keys(), path
    assert [path for path, methods in document['paths'].items() if 'event-stream' in str(methods)] == [
        *COMPLETION_PATHS
    ]


def test_the_pages_need_the_option_and_no_key():
    with ServerThread(served_by(FakeEngine())) as server:
        assert {httpx.get(f'{server.url}{path}').status_code for path in (DOCS, OPENAPI)} == {404}
    with ServerThread(served_by(FakeEngine()), docs=True, api_key='secret') as server:
        answer = httpx.get(f'{server.url}{DOCS}')
        assert answer.status_code == 200
        assert httpx.get(f'{server.url}{OPENAPI}').json()['openapi'] == '3.1.0'
    assert "default-src 'none'; style-src 'sha256-" in answer.headers['content-security-policy']
    assert 'script' not in answer.headers['content-security-policy']


def test_the_reference_describes_every_parameter(document):
    text = api_reference(document).text
    assert '<script' not in text
    assert re.findall(r'(?:src|href)="(?!#|/|data:)', text) == []
    for path in document['paths']:
        assert f'</span> {path}</h2>' in text
    for name, kind in {
        'top_p': 'number above 0 to 1',
        'top_k': 'integer from 0 to 2147483647',
        'prompt': 'string or array of string or array of integer from 0 or array of array of integer from 0',
        'messages': 'array of object with role, content, tool_calls, tool_call_id, name',
        'encoding_format': '&quot;float&quot; or &quot;base64&quot;',
    }.items():
        assert re.search(rf'<code>{name}</code>(?: <b>required</b>)?</th><td>{re.escape(kind)}</td><td>\w', text), name
    assert 'curl http://127.0.0.1:8000/v1/embeddings' in text
    assert text.count('With stream=true') == len(COMPLETION_PATHS)


def test_text_is_escaped():
    text = api_reference(served_document(served_by(FakeEngine())._replace(name='<script>x</script>'))).text
    assert '<script>' not in text
    assert '&lt;script&gt;' in text
