"""Which worker holds which blocks."""
