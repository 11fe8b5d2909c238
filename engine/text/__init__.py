"""Characters to ids and back: tokenizer, chat template, streams. Knows no model."""
