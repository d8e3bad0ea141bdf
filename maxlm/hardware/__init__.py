"""Chips, their statistics, and prices."""
