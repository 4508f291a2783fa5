"""The door for HTTP: a server, and the APIs that it serves."""
