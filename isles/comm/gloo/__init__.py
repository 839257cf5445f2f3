"""Real processes: torch.distributed (gloo, NCCL) as a transport."""
