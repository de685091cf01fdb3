"""Where the state of a stage comes from when a peer takes it over: ``sources(view, unit, stage, draw)``.

It gives the nodes to fetch from, in parts of equal size; none means the checkpoint, and what was done since is lost.
``view`` is `simkit.des.swarm_transfer.View`. KEEPS says what survives the loss of a holder in words.
"""
