"""An S3 on loopback: moto's server, which this process takes for Amazon's."""

from __future__ import annotations

import contextlib

import boto3
from moto.server import ThreadedMotoServer


@contextlib.contextmanager
def running(monkeypatch):
    """A client of boto3, to put objects with."""
    from maxlm.data import buckets

    server = ThreadedMotoServer(ip_address='127.0.0.1', port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        'AWS_ENDPOINT_URL': f'http://{host}:{port}',
        'AWS_ACCESS_KEY_ID': 'test',
        'AWS_SECRET_ACCESS_KEY': 'test',
        'AWS_DEFAULT_REGION': 'us-east-1',
        # A failing request is not tried again by the library.
        'AWS_MAX_ATTEMPTS': '1',
    }.items():
        monkeypatch.setenv(name, value)
    # The endpoint is read when the first request is made.
    buckets._filesystem.cache_clear()
    try:
        yield boto3.client('s3')
    finally:
        server.stop()
        buckets._filesystem.cache_clear()
