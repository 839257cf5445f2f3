"""What links cost: pure functions of sizes, rates and seeds, without torch and without side effects.

A network        `links`: rates, latencies, jitter, who shares an uplink; presets, files of one's own, cities.
                 `churn`, `pauses`: workers that come, go and stand still.
                 `engine`, `noise`: events, messages and random numbers of simulated time.
A run            `exchange_plan`: planned exchanges, and memory by kind. `routing`: tasks of a pipeline.
                 `clusters`: unequal nodes together. `machines`: what one worker's machine can do, seconds of a step
                 from a GPU's name. `units`: amounts as people write them.

Units: bits, bits per second, seconds; bytes where a name says so.
"""
