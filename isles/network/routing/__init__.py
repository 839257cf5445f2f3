"""The route of every microbatch through the workers of a pipeline, the schedule of their tasks, and the time that it
takes. Routes that skip and swap stages are SkipPipe's (arXiv 2502.19913).
"""
