"""How one copy of the model is cut in depth, and which way each microbatch goes through the stages.

`config`      the `[pipeline]` section
`pipeline`    `Pipeline`: stages for a loop of one's own
`routers`     the way of each microbatch; `partial`: by a plan of paths (SkipPipe)
`executor`    one worker's share of a step; `compute`: forward and backward of one microbatch
`wire`        messages between stages; `boundaries`: what crosses, and in which form; `rowwise`: AdamW for a subspace
`evaluation`  the loss of weights that lie in stages
`recovery`    a lost stage made anew (CheckFree)
`swarm`, `ravnest`  stages of peers that come and go; `peers`: what the two share
"""
