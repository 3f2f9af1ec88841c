"""Building blocks that several packages of drafters share."""
