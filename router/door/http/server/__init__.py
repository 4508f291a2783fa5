"""An HTTP server, and what it does with every request, whichever API it is of."""
