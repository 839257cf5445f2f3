"""The way of every microbatch through the workers of a pipeline, who does what when, and how long that takes. Ways that
leave stages out and exchange others are SkipPipe's (arXiv 2502.19913).

`events`    routes, and their tasks in simulated time; `replay`: how long a step of them takes
`problem`   nodes, stages and times for which paths are wanted; `search`: the best paths
`plan`      a plan of paths as a file, its checks, and the speeds and delays that it starts from
"""
