"""What the next step computes: decodes, prompts, admission, drafts, and when it is to be planned."""
