"""Bodies of requests and replies of the HTTP API, one module per route or group of fields.

The API is OpenAI's and Anthropic's for text, with some fields of vLLM and of pronk. The server
refuses a field that would change the answer and that it does not implement; the error names it.
"""
