"""`isles plan`: what runs cost and how they are laid out, before they begin; a file for each of its commands."""
