"""Where does the step go, and what would change it most? 32 RTX 2080 Ti over 10 GbE."""

import simkit

for method, rank in (("s-sgd", None), ("acp-sgd", 32)):
    report = simkit.predict(
        model="bert-large",
        cluster="8x4x2080ti",
        inter="10gbe",
        method=method,
        rank=rank,
        micro_batch=8,
        seq_len=64,
        precision="fp32",
    )
    total = sum(report.breakdown.values())
    assert abs(total / report.iteration_time_s - 1) < 1e-9, "the terms are disjoint and sum to the step"
    waiting = report.breakdown["exposed_comm_s"] / total
    names = [item.name for item in report.sensitivities]
    print(f"{method:8s} waits for the network most of the step: {waiting > 0.5}")
    print(f"         a faster network is among the five inputs that count: {'network bandwidth' in names}")
