"""Out-of-core data parallelism beside the ways that cut the model, on equal devices and links, in closed forms."""
