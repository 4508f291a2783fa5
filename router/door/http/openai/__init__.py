"""The OpenAI-compatible HTTP door. Bodies become `GenerateRequest`s; `Api` does the rest."""
