"""What links cost: pure functions of sizes, rates and seeds, without torch and without side effects.

A network        `links`: rates, latencies, jitter, shared lines; presets. `places`: lines between cities. `own`: a
                 file of one's own. `pipe`, `noise`, `pauses`: fair sharing, random numbers and absences
                 for the virtual backend. `churn`: workers that come and go.
An exchange      `costs`: payloads over the busiest link and latencies in a row, of ring, tree, two-shot, all-gather
                 and pair; over unequal lines, where the slowest rules.
A run            `job`, `forms` (sizes on the wire), `ways` (this library's methods: waiting) -> `planner`: bytes,
                 memory, an order. `hardware`: seconds of a step from a GPU's name. `units`: amounts as people write
                 them.
As papers count  `exchanges` (which layers are exchanged after which step) -> `utilisation` (the layers of one model,
                 one serial link) -> share of the time spent computing, or the rate for a share -> `eager_tables`.
Waiting          `latency` (a tree against a pair, random message times), `barrier` (all against a partner, random
                 step times), `fleet` (both event by event, with pauses), `quadratic` (NoLoCo's theory: mean,
                 variance, stability).

Units: bits, bits per second, seconds; bytes where a name says so.
"""
