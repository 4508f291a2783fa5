"""Which unit a request goes to, and the router of each unit."""
