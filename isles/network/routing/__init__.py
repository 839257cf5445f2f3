"""The way of every microbatch through the workers of a pipeline, who does what when, and how long that takes. Ways that
leave stages out and exchange others are SkipPipe's (arXiv 2502.19913).
"""
