"""The connection between a router and a worker: calls as frames on one TCP connection.

A frame is `<u32 length of the payload, u8 kind, u32 call>`, little-endian, and the payload. The
first frame is HELLO with the router's `keepalive_s`, answered by WELCOME, so that a peer whose
process stands still never counts as connected. A router begins calls (CALL: u8 method and the
request). Either side sends messages of a call. The worker ends it (END: u8 status code and a
google.rpc.Status), the router cancels it. Messages are protobuf.

Each side sends PING when it was silent for `keepalive_s`, and gives up a peer from which it has
heard nothing for twice that, however busy or gone.

Nothing waits for a task: whole frames are handed on as they are read. What is sent goes to the
socket at once, or into the transport's buffer. A sender that may fall behind looks at `room`.

The worker's gRPC server has the same port: a connection that begins with HTTP/2's preface is passed
on to it, byte by byte. Where TLS is configured (`link_tls`) a link without it is refused.
"""
