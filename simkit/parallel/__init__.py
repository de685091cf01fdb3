"""Parallelism: what one rank computes and what it exchanges, without seconds.

tensor    columns of one rank under tensor, sequence, context and expert parallelism; messages per block
pipeline  which blocks a stage holds
zero      what data-parallel ranks shard, gather and reduce
"""
