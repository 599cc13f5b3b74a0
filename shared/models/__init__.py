"""A model's files as several services read them: where they lie, the tokenizer, byte alphabets, structural tags."""
