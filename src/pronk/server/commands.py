"""Commands of the command line that serve models."""

from pronk.base.guests import Command

SERVE = Command(
    "pronk.server.cli.serve:serve",
    "Serve one or more models to clients of OpenAI and Anthropic, with a chat page at /.",
)
BATCH = Command("pronk.server.cli.batch:batch", "Answer a file of requests.")
