"""The formats of tool calls, a module for each family of models; `reader.py` makes the reader of a format."""
