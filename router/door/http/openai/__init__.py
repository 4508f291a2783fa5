"""The OpenAI-compatible HTTP door. Bodies become `GenerateRequest`s; `Intake` does the rest."""
