"""Can 50 RTX 3080s do the work of 4 H100s? It depends on the network, and on how often gradients are exchanged."""

import simkit

JOB = {"model": "bert-large", "precision": "bf16", "seq_len": 128, "method": "s-sgd"}
server = simkit.predict(**JOB, cluster="4xH100-PCIe", micro_batch=64)

print("network        every micro-batch   every 64th")
for network in ("1gbe", "10gbe", "100gbe-rdma"):
    words = []
    for accumulated in (1, 64):
        cards = simkit.predict(**JOB, cluster="50x3080", inter=network, micro_batch=8, grad_accum=accumulated)
        words.append("faster" if cards.samples_per_s > server.samples_per_s else "slower")
    print(f"{network:14s} {words[0]:19s} {words[1]}")
