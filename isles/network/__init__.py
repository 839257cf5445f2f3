"""What links cost: pure functions of sizes, rates and seeds, without torch and without side effects.

A network                `links`: rates, latencies, jitter, shared uplinks; presets, `places` (cities), files of one's
                         own (`own`). `uplink`, `noise`: fair sharing and random numbers for the virtual backend.
What one exchange costs  `costs`: payloads over the busiest link and latencies in a row, of ring, tree, two-shot,
                         all-gather and pair; over unequal links, where the slowest rules.
What a run computes      `exchanges` (which layers are exchanged after which step) -> `utilisation` (layers of one model
                         and one serial link) -> share of the time spent computing, or the bandwidth that a share needs.
What waiting costs       `latency` (a tree against a pair, random message times), `barrier` (all against a partner,
                         random step times), `quadratic` (NoLoCo's theory: mean, variance, stability).
The papers' tables       `eager_tables`: the tables of the Streaming and Eager DiLoCo papers from those parts.

Units: bits, bits per second, seconds; bytes where a name says so.
"""
