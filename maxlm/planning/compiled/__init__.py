"""Analyzes compiled programs: their HLO, memory, matmuls and collectives."""
