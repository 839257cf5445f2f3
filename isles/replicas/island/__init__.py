"""Several workers that are one replica. `island`: what each of them holds of it; `fsdp`: `isles.shard`."""
