"""The connection of a router or an operator to a worker: calls as frames on one TCP connection.

A frame is `<u32 length of the payload, u8 kind, u32 call>`, little-endian, and the payload. The
first frame is HELLO with the caller's `keepalive_s`, role, nonce and the worker that it means.
Where identities are keys, the worker answers CHALLENGE: a nonce of its own, and its signature over
the HELLO and that nonce. The caller leaves who does not prove that it is a worker, else it sends
PROOF: its signature over the same. WELCOME follows. So a peer whose process stands still never
counts as connected, nothing can be replayed, and until WELCOME there are small frames and little
time. With TLS the certificates say who it is. `CALLERS` has the roles that may make each call.

A caller begins calls (CALL: u8 method and the request). Either side sends messages of a call. The
worker ends it (END: u8 status code and a google.rpc.Status), the caller cancels it. END of no call
refuses the link. Messages are protobuf.

Each side sends PING when it was silent for `keepalive_s`, and gives up a peer from which it has
heard nothing for twice that, however busy or gone.

Nothing waits for a task: whole frames are handed on as they are read. What is sent goes to the
socket at once, or into the transport's buffer. A sender that may fall behind looks at `room`.
"""
