"""What measures the worker's insides; started as processes by `baton bench`, as torch is the worker's alone."""
