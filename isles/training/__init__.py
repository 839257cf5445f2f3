"""A whole run: configuration, the trainer, the launcher, what is measured and written."""
