"""Messages of `isles.comm.elastic.transport` in chunks with receipts: `outgoing` to one peer, `incoming` from all."""
