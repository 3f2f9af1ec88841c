"""Speculation: the token tree, the contract of a drafter, and the policy of how much to draft."""
