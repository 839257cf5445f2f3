"""Speed and memory of Isles as ratios against a peer or a floor in one run: `python -m benchmarks.NAME`."""
