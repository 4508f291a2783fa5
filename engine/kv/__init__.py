"""KV blocks as numbers: who holds them, what they hold, when they are free. No tensor is here."""
