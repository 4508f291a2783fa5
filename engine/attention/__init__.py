"""Paged KV and the kernels that touch it, one protocol with a torch and a native implementation."""
