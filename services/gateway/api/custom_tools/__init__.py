"""Custom tools, which take a text: to a model they are functions of one parameter."""
