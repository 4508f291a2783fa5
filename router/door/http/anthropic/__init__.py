"""Anthropic's messages, as chats. Bodies and answers are translated; `openai` does the rest."""
