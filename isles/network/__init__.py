"""What links cost: pure functions of sizes, rates and seeds, without torch and without side effects.

A network        `links`: rates, latencies, jitter, shared uplinks; presets, sites and files of one's own. `churn`,
                 `pauses`: workers that join, leave and pause. `engine`, `noise`: events, messages and random numbers
                 of simulated time.
A run            `exchange_plan`: planned exchanges, and memory by kind. `routing`: tasks of a pipeline. `clusters`:
                 unequal nodes together. `machines`: memory and rates of a worker's machine, seconds of a step from a
                 GPU's name. `units`: amounts as people write them.

Units: bits, bits per second, seconds; bytes where a name says so.
"""
