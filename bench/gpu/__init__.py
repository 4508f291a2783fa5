"""What the GPU path does and how fast: `python -m bench.gpu`."""
