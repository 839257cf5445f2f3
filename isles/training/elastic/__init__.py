"""A run whose workers come and go: the lighthouse's side (`lighthouse`), a worker's (`joining`)."""
