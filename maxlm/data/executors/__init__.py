"""Runs the tasks of `maxlm prepare`, in local processes or on Ray."""
