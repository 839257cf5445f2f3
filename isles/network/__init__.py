"""What links cost: pure functions of sizes, rates and seeds, without torch and without side effects.

A network        `links`: rates, latencies, jitter, shared lines. `named`: presets. `places`: lines between cities.
                 `own`: a file of one's own. `engine`, `noise`, `pauses`: events and lines, random numbers and absences
                 for the virtual backend. `churn`: workers that come and go.
A run            `planner`: exchanges as they are planned, replayed over those lines. `routing`: tasks of a pipeline.
                 `clusters`: unequal nodes together. `machines`: what one worker's machine can do, seconds of a step
                 from a GPU's name. `units`: amounts as people write them.
As papers count  `theory`: `exchanges` (which layers are exchanged after which step) -> `utilisation` (the layers of
                 one model, one serial link): share of the time spent computing, rate for a share -> `eager_tables`.
Waiting          `latency` (a tree against a pair, random message times), `barrier` (all against a partner, random
                 step times), `fleet` (both event by event, with pauses), `quadratic` (NoLoCo's theory: mean,
                 variance, stability).

Units: bits, bits per second, seconds; bytes where a name says so.
"""
