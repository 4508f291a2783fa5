"""The door for gRPC: HTTP/2, calls, and the services over them."""
