"""What workers say to each other: over connections of their own, from end to end.

`stream`      one TLS 1.3 connection, on which one of a pair sends and the other one says what it has taken
`sending`     all messages to one peer; `inbox`: what has come, and what is waited for
`pairs`       who dials whom: directly, where the lighthouse knows that one is reached, else both dial who carries for
              them, the lighthouse or a worker; `listening`: where a worker is reached
`ties`        how two connections are found that belong together; `splice`: what comes on one leaves on the other
"""
