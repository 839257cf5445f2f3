"""The way of every microbatch through the workers of a pipeline, who does what when, and how long that takes."""
