"""How many workers each pool should have, and why. Standard library only, and pure.

Nothing here reads a clock, does I/O or keeps anything between two calls. Time comes with the
signals, and the caller passes the state from one call to the next.
"""
