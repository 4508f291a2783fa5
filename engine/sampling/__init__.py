"""From logits to tokens: grammars, filters and noise."""
