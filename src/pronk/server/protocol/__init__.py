"""What clients may send, and what they get: OpenAI's interface, as far as a model of text has it.

Unknown fields and those that are not built yet are refused by name: nothing is ignored in silence.
"""
