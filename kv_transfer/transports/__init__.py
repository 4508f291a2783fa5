"""Transports by name. UCX's, and one in memory for tests and simulation."""
