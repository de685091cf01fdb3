"""What an activation or its gradient becomes on a line between two peers: one file per format, its name is the key.

Every module offers

    sent_bytes(raw_bytes, *, element_bytes, density, share)   bytes on the wire; arrays, one entry a line
    PASSES                                                    how often sender and receiver each touch the tensor in
                                                              device memory to encode or decode it

share: seconds of the uncompressed message over those of the slowest line, 0 to 1. density: share of the elements kept.
Lossy formats change what is learned; the answer says so.
"""
