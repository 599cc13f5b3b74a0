"""Expert parallelism: each rank of a stage has whole experts of a mixture, in place of a share of every expert."""
