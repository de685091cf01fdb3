"""Below which bandwidth does compression pay? BERT-large on 32 machines with one RTX 2080 Ti each."""

import simkit

JOB = {"model": "bert-large", "cluster": "32x1x2080ti", "precision": "fp32", "micro_batch": 8, "seq_len": 64}


def seconds(method: str, gigabits: float) -> float:
    rank = None if method == "s-sgd" else 32
    return simkit.predict(**JOB, rank=rank, method=method, inter=f"{gigabits}Gb/s@50us").iteration_time_s


print("Gb/s   from fast to slow")
for gigabits in (1, 10, 400):
    print(f"{gigabits:4d}   {', '.join(sorted(('s-sgd', 'power-sgd', 'acp-sgd'), key=lambda m: seconds(m, gigabits)))}")

low, high = 1.0, 400.0
for _ in range(30):
    middle = (low * high) ** 0.5
    if seconds("power-sgd", middle) < seconds("s-sgd", middle):
        low = middle
    else:
        high = middle
print("power-sgd and s-sgd are equal between 30 and 300 Gb/s:", 30 < low < 300)
