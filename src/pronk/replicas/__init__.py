"""Replicas of a model on Ray, behind one server. Each replica has the whole model."""
