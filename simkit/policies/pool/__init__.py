"""How many spares to hold while the broker recruits: ``target(slots, backup_pool, losses_per_s, lead_s)``.

losses_per_s: peers lost per second on average; lead_s: from a loss to its replacement being there.
"""
