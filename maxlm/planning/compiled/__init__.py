"""What a compiled program does: its HLO, memory, matmuls and collectives."""
