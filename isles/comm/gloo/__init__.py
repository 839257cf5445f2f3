"""Real processes: torch.distributed (gloo, NCCL) as a transport.

`transport`  messages between processes
`transfers`  the threads that drive messages behind the computation; signs of life, also in elastic worlds
"""
