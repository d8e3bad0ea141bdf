"""Decisions during a run, such as its length, rollbacks and replays: pure functions of numbers."""
