"""What layers with states compute between their projections."""
