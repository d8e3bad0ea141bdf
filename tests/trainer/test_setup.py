"""Tests the identities of devices that a run records at its start."""

import jax

from maxlm.trainer import setup


def test_identities_are_logged_and_returned(monkeypatch, caplog):
    caplog.set_level('INFO', logger='maxlm')
    identity = {'driver': '580.65.06', 'devices': [{'index': 0, 'kind': 'NVIDIA H200', 'uuid': 'GPU-1'}]}
    monkeypatch.setattr(setup, 'identify', lambda: identity)
    assert setup.gather_identities() == []
    monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
    assert setup.gather_identities() == [identity]
    assert caplog.messages == ['devices of process 0: driver 580.65.06; device 0: NVIDIA H200, GPU-1']
