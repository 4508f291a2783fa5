"""How many workers each pool should have, and why. Standard library only, and pure.

Nothing here reads a clock, talks to anybody or keeps anything between two calls: time comes with
the signals, and what has to be remembered goes out and comes in again as the state.
"""
