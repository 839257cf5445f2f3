"""Workers that come and go on the virtual clock: the same `Membership` and `Member` as between real processes."""
