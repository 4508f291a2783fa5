"""The port for operators: metrics and a page."""
