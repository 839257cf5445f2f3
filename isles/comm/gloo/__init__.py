"""Real processes: torch.distributed (gloo, NCCL) as a transport.

`transport`  messages between processes; `transfers`: the threads that drive them behind the computation
`liveness`   signs of life of the other workers, in fixed and elastic worlds
"""
