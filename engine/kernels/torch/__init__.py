"""The kernels in plain torch."""
