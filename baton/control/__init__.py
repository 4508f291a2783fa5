"""The control service: how operators, routers and workers call it, and who may."""
