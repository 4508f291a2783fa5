"""Reconcilers: each reads a cluster's view, and writes what its objects lack."""
