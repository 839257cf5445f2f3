"""Which way each microbatch goes, one router a file."""
