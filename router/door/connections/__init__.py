"""Sockets, what their connections share, and who may open one."""
