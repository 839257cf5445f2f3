"""What methods at gradient level share: buckets, reductions, thresholds."""
