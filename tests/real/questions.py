"""Questions for real models."""

QUESTIONS = (
    "What is the capital of France?",
    "List the days of the week.",
    "Write a Python function that adds two numbers.",
    "Explain photosynthesis in one sentence.",
    "Translate 'good morning' into Spanish.",
    "What is 17 + 25?",
    "Name three colours of the rainbow.",
    "Who wrote Romeo and Juliet?",
    "Fix this code: `def f(x): retrun x`",
    "Summarize: The cat sat on the mat. The mat was red. The cat was happy.",
    "Give a JSON object with the keys name and age.",
    "Is the earth flat? Answer yes or no.",
    "Write a haiku about rain.",
    "What comes after Tuesday?",
    "Convert 3 km to metres.",
    "Describe a dog in two words.",
    "What does HTTP stand for?",
    "Repeat this word three times: banana",
    "How many legs does a spider have?",
    "Write an SQL query that counts the rows of the table users.",
)


def conversation(question: str) -> list[dict[str, str]]:
    """Return a conversation with one question and a system message."""
    return [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": question},
    ]
