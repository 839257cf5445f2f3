"""What every room stands on: errors, files, tables, names of settings; nothing of training."""
