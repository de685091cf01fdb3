"""How to divide a 7B network over one server of 8 A100s: every tensor degree and ZeRO stage, by one sweep."""

import simkit

JOB = {"model": "llama-2-7b", "cluster": "1x8xa100", "stack": "megatron", "seq_len": 4096, "global_batch": 64}
GRID = {"tp": (1, 2, 4, 8), "zero": (0, 1), "micro_batch": (1, 2)}

points = simkit.sweep(**JOB, grid=GRID)
fits, speed = points["fits"], points["tokens_per_s_per_gpu"]

print("tp  zero  fits with one sample a micro-batch")
for tp, zero, micro_batch, fit in zip(*(points[name] for name in ("tp", "zero", "micro_batch", "fits")), strict=True):
    if micro_batch == 1:
        print(f"{tp:2d}  {zero:4d}  {'yes' if fit else 'no'}")

best = max(range(len(fits)), key=lambda i: speed[i] if fits[i] else 0.0)
print(f"fastest that fits: tp={points['tp'][best]} zero={points['zero'][best]}")

# The same point on its own: a sweep is predict, many times.
alone = simkit.predict(**JOB, **{name: int(points[name][best]) for name in GRID})
print("predict says the same:", abs(alone.tokens_per_s_per_gpu / speed[best] - 1) < 1e-9)
