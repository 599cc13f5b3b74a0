"""transformers' own continuous batching behind two pipes, to be measured beside ours. Nothing that serves needs it."""
