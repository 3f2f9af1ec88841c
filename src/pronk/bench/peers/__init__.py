"""Peers: other engines, measured on the same model file, prompts, token counts and threads as pronk.

Each peer runs in a process of its own, which isolates crashes, memory and threads. Time is measured in that process,
around the engine's generate call, so that communication does not count. Input and output are token ids.
"""

from pronk.bench.peers.engines.contract import PeerRequest, PeerResult
from pronk.bench.peers.process import PEERS, Peer, PeerError, PeerSpec, choose_peers

__all__ = ["PEERS", "Peer", "PeerError", "PeerRequest", "PeerResult", "PeerSpec", "choose_peers"]
