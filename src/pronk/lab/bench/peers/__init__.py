"""Peers: other engines that a benchmark measures beside pronk.

Model file, prompts, numbers of tokens and threads are the same as pronk's. Each peer runs in a
process of its own, which isolates crashes, memory and threads. Time is measured in that process,
around the engine's generate call, so that communication does not count. Input and output are token
ids.
"""
