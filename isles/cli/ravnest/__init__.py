"""`isles ravnest`: clusters of unequal nodes, each of which holds a copy of the model."""
