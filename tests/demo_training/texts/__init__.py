"""The generators, one module per kind of text. Pure: seeded random numbers in, examples out."""
