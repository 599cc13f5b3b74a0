"""One rank of an engine: a process that executes step plans on a device."""

from shared.config import default_environment

# PyTorch's threads (GNU OpenMP) wait for the next operation spinning, for several milliseconds unless they are told
# otherwise, and sampling has one wherever tokens are drawn: a decode step's own threads then share their cores with
# threads that do nothing. So they wait as long as ours do, some 60 µs (`ops/native/waiting.h`). It has to be said
# before PyTorch is imported; an operator's own word stands.
default_environment({"GOMP_SPINCOUNT": "3000"}, unless="OMP_WAIT_POLICY")
