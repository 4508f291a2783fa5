"""Checks whether a machine or pod can serve, and says how to fix what is wrong.

Run `python -m cluster.preflight`. It reads /proc, /sys and limits and changes nothing. Two
processes that it starts hand over KV as workers do, or one hands over to another pod's. It may
import what workers import, but never Ray.
"""
