"""The papers' calculations, as pure functions."""
