"""The front door: admission, placement and token streams over a fleet of workers.

A request comes in at `door` and goes to one of the `units`, whose `Router` has `text` tokenize it
and makes it a `request`. It waits in `placement`'s line for a placement on the workers of the
`fleet`, and streams its output. `report` has metrics and figures.

May import `kv_transfer.block_hash` and `baton.v1`; never torch, ray or libucp. Text lives in
`router.text` and nowhere else. Nothing here survives a restart: the decode workers keep what must
not be lost until another router attaches.
"""
