"""What peers that come and go have in common, in swarms and in clusters: agreement, messages, joining."""
