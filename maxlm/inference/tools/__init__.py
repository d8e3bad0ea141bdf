"""Rollouts in which the model calls tools."""
