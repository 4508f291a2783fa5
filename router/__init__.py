"""The front door: admission, placement and token streams over a fleet of workers.

May import `kv_transfer.block_hash` and `baton.v1`; never torch, ray or libucp. Text (tokenizer,
chat template, detokenizer) lives in `router.text` and nowhere else. Nothing here survives a
restart: what must not be lost is kept by the decode workers until another router attaches.
"""
