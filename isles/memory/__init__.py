"""A model larger than the device: what of each block stays there, is swapped or recomputed, planned and then run
(KARMA, arXiv 2008.11421; AutoHete, arXiv 2503.01890).

Decided beforehand, without torch:

`costs`        what each choice for a block takes on the device, the host, the disk and every lane
`lanes`        a step played through on those lanes; `serial`: lanes on a simulated clock
`search`       the fastest plan that fits (`searching`); `plan`: a plan as data
`parallel`     the same beside ways that cut the model, in closed forms

What the plan is made from:

`profile`      what a model's blocks take, without the memory that a run would need (`profiling`)
`measuring`    what this machine can do

At work: losses, weights and optimizer states keep every bit of the run without a plan.

`managed`      `Managed`: the optimizer around the model's own
`runner`       forward and backward passes under the plan; `passes`: their order; `units`: the blocks of a model
`activations`  swapped to the host or made again; `parameters`, `slots`: weights that come for a pass; `gradients`
`updates`      updates of some parameters of one optimizer; `sharing`: states shared among workers
`disk`         the tier behind the memory; `stored`: what it holds of a block
`arena`        the device's bytes, granted in order; `meter`: counted; `engines`: who moves them beside the computation
"""
