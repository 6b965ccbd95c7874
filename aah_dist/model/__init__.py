"""The Megatron-core GPT whose heads each read their own window."""
