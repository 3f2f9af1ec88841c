"""Bodies of requests and replies: the OpenAI API for text, with some fields of vLLM and of pronk.

The server refuses unknown and unsupported fields, and names the field in the error.
"""
