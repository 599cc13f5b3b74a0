"""Layers with states as Triton kernels: what their recurrences make of a step's rows, and leave behind them."""
