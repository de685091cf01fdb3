"""How long peers stay and when they come: a file here is a law, its name the key (``exponential``, ``weibull`` …).

`simkit.churn._common.churn` reads the text of a scenario, such as ``weibull:4h,shape=0.6``.
"""
