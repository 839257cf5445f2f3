"""Corrections that `isles.memory.profile` needs.

`like_real`       where fake tensors take other bytes than real ones
`fully_sharded`   what FSDP, which holds the weights itself, has on the device
"""
