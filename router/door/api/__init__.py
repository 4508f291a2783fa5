"""What clients may ask, whatever they speak."""
