"""Files that one member of a run hands to another: the state to begin with, what a worker came to, the one model.

`giving`      a file under a name, in pieces, and who waits for it
`taking`      a file in pieces, each of which bears the giver's seal
"""
