"""S3 emulator on loopback: moto's server, which this process uses instead of Amazon's."""

import contextlib
import functools
import urllib.request

import boto3
from moto.server import ThreadedMotoServer

CREDENTIALS = {'AWS_ACCESS_KEY_ID': 'test', 'AWS_SECRET_ACCESS_KEY': 'test', 'AWS_DEFAULT_REGION': 'us-east-1'}


@functools.cache
def _server():
    """Starts the server once per process, because it takes longer than most tests. Returns its URL and a client."""
    server = ThreadedMotoServer(ip_address='127.0.0.1', port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f'http://{host}:{port}'
    key, secret, region = CREDENTIALS.values()
    return url, boto3.client(
        's3', endpoint_url=url, aws_access_key_id=key, aws_secret_access_key=secret, region_name=region
    )


@contextlib.contextmanager
def running(monkeypatch):
    """Yields a boto3 client of an empty server, and deletes all objects afterwards."""
    from maxlm.storage import object_store

    url, client = _server()
    # boto3 must not retry failing requests.
    for name, value in {**CREDENTIALS, 'AWS_ENDPOINT_URL': url, 'AWS_MAX_ATTEMPTS': '1'}.items():
        monkeypatch.setenv(name, value)
    # The cached file system has read the endpoint at its first request.
    object_store._filesystem.cache_clear()
    try:
        yield client
    finally:
        urllib.request.urlopen(f'{url}/moto-api/reset', b'').close()
        object_store._filesystem.cache_clear()
