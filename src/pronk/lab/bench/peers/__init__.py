"""Peers: other engines, measured on the same model file, prompts, token counts and threads as pronk.

Each peer runs in a process of its own, which isolates crashes, memory and threads. Time is measured
in that process, around the engine's generate call, so that communication does not count. Input and
output are token ids.
"""
