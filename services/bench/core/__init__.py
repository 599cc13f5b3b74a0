"""What a benchmark computes, apart from any network or clock."""
