"""Pure: a spec into the objects that serve it. Nothing here talks to an API server."""
