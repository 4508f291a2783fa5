"""Transport over libucp, called directly: one-sided puts into UCX-allocated memory.

Nothing here knows leases or blocks. Importing this package loads no library; creating a
`UcxTransport` does.
"""
