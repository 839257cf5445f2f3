"""How workers reach each other: directly, where the lighthouse knows that they can (`whereabouts`), or over it."""
