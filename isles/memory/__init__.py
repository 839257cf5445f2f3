"""A model larger than the device: what of each block is kept there, swapped or made again, planned and then run.

`costs`, `lanes`, `search` and `plan` decide and say beforehand what it takes; they never load torch. `manage` runs a
plan: losses, weights and optimizer states keep every bit of the run without it.
"""
