"""Paged KV and the kernels that touch it, one protocol with torch, native and Triton ones."""
