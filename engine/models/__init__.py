"""The decoder, written once for all families: what differs between them is a frozen ModelConfig.

Nothing here knows requests or schedules: token ids and block tables in, hidden states out.
"""
