"""Many workers in one process on a virtual clock: real tensors, while every message costs what the links say."""
