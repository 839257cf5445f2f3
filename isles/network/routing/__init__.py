"""The way of every microbatch through the workers of a pipeline, who does what when, and how long that takes. Ways that
leave stages out and exchange others are SkipPipe's (arXiv 2502.19913).

`problem`     workers, stages and paths; `routes`: one way; `assignment`: workers to stages
`search`      the best paths; `plan`: what it found, as a file
`events`      tasks in simulated time; `replay`: a plan replayed on the links; `speeds`: how fast workers compute
"""
