"""What methods at gradient level share. `bucketed`: buckets behind the backward pass; `reduction`: means, thresholds;
`config`: settings.
"""
