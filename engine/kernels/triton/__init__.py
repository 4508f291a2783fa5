"""The kernels in Triton, for a GPU."""
