"""Text to token rows: corpus -> tokenizer -> prepared folder -> rows in a seeded order."""
