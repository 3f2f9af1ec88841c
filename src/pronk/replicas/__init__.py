"""A model on several machines: replicas on Ray, each of them whole, behind one server."""
