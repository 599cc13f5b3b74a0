"""C++ kernels for CPUs, compiled on the machine that runs them."""
