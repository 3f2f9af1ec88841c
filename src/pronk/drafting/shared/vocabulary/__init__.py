"""Translation between vocabularies: a draft model may draft for a target with other tokens."""
