"""What a detokenizer decides, apart from any bus or clock. Read `detokenizer.py` first, then `text.py`."""
