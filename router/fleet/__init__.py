"""The workers: what the registry reports, the connections to them, and the load put on each."""
