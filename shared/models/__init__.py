"""A model as several services read it: its files, tokenizer, byte alphabets, structural tags, and engines' profiles."""
