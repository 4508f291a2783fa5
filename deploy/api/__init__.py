"""The custom resources as dataclasses, and what is generated from them. Pure: nothing here talks
to an API server.
"""
