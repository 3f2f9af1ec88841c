"""Questions to ask a chat model, made from documents: real ones, and instructions about an excerpt or a topic.

The drafter of a chat model learns from the model's own answers. The answers should be as varied as those that the model
will be asked for, so the questions come from several pools:

========  ==========================================================================================
``math``  documents that begin with ``Question:``
``chat``  first messages of dialogues (``User:``), and their real second message
``shop``  first messages of customers (``Customer:``)
``topic`` an open question about the heading of a document
``text``  an instruction about an excerpt of a document: summarize, answer, rewrite, translate, ...
``code``  a task for a programmer, or an instruction about an excerpt of a Python file
========  ==========================================================================================
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from pronk.corpus.dialogue import user_turns
from pronk.corpus.exclude import Exclusion
from pronk.corpus.sources import SourceSpec, read_source
from pronk.errors import OptionError

__all__ = ["WEIGHTS", "Questions"]

# Dialogues of each pool in 100. A pool without documents leaves its share to the others.
WEIGHTS = {"math": 17, "chat": 20, "shop": 5, "topic": 25, "text": 25, "code": 8}
_SECOND_TURN = 0.35  # share of dialogues with a second question
_MIN_WORDS, _MAX_WORDS = 30, 450  # length of an excerpt, log-uniform
_MIN_DOCUMENT = 120  # minimum words of a document to make excerpts of
_EVERYDAY_SHARE = 0.4  # share of everyday topics among the topics; the others are headings of documents
_MAX_QUESTION = 600  # maximum words of a real question
_HEADING = re.compile(r"^(?:#{1,3} |Title: )([A-Z][^\n{}<>|`0-9:]{6,60}[a-z])$", re.MULTILINE)

_TEXT = (
    "Summarize the following text in a few sentences.\n\n{}",
    "Summarize this in one paragraph:\n\n{}",
    "{}\n\nTL;DR:",
    "Write a short headline and a three-sentence summary of this passage.\n\n{}",
    "List the main points of the following text.\n\n{}",
    "What is the following passage about? Answer in two or three sentences.\n\n{}",
    "Read the passage and answer: what are the most important facts in it?\n\nPassage: {}\n\nAnswer:",
    "Answer the question using only this context.\n\nContext: {}\n\nQuestion: What does the author say, and why?",
    "Here are some documents.\n\nDocument: {}\n\nWhat does the document explain? Use the information above.",
    "Explain the following text to a beginner.\n\n{}",
    "Rewrite the following text in simple English.\n\n{}",
    "Rewrite this in a formal tone:\n\n{}",
    "Correct the grammar and improve the style of this text:\n\n{}",
    "Translate the following text to Spanish.\n\n{}",
    "Translate to French:\n\n{}",
    "Translate to German:\n\n{}",
    "Continue this text:\n\n{}",
    "Continue the story.\n\n{}",
    "Write three questions that this text answers, and answer each of them.\n\n{}",
    "Extract all names, dates and numbers from this text as a list.\n\n{}",
    "Turn the following text into a list of bullet points:\n\n{}",
    "What is the tone of this passage? Explain your answer.\n\n{}",
    "Is the following text true? Discuss.\n\n{}",
    "Write a letter to the author of this text and say what you think of it.\n\n{}",
)
_TOPIC = (
    "What is {}?",
    "Explain {} in simple words.",
    "Explain {} to a ten-year-old child.",
    "Write a short essay about {}.",
    "Write a blog post about {}.",
    "Write a short story in which {} plays a role.",
    "Write a poem about {}.",
    "Give me five tips about {}.",
    "What are the advantages and disadvantages of {}?",
    "Give three examples of {} and explain each one.",
    "How does {} work? Answer step by step.",
    "Why is {} important?",
    "Compare {} with an alternative of your choice.",
    "I have to give a talk on {}. Write an outline.",
    "Write an email to a colleague about {}.",
    "What should a beginner know about {}?",
    "Make a quiz of four questions on {}, with the answers.",
    "Imagine that you are an expert on {}. What would you tell a journalist?",
    "Describe the history of {}.",
    "Write a Python function that has to do with {}, and explain it.",
    "Who should care about {}, and why?",
    "Write a dialogue between a teacher and a student about {}.",
)
_EVERYDAY = tuple(
    "artificial intelligence,a trip to Japan,climate change,healthy food,learning a language,remote work,a job interview,"
    "the stock market,electric cars,the Roman Empire,photosynthesis,black holes,the human heart,sleep,coffee,chess,jazz,"
    "a small garden,raising a dog,cats,football,swimming,a wedding,friendship,honesty,time management,saving money,taxes,"
    "a business plan,marketing,a product launch,customer support,cloud computing,databases,the internet,privacy,passwords,"
    "social media,video games,science fiction,Shakespeare,a detective,dragons,a lighthouse,the ocean,rain,mountains,"
    "volcanoes,earthquakes,dinosaurs,evolution,DNA,vaccines,antibiotics,mental health,yoga,running a marathon,cooking pasta,"
    "baking bread,wine,vegetarian food,the school system,homework,teachers,universities,democracy,elections,the United "
    "Nations,human rights,poverty,immigration,money,inflation,supply and demand,globalization,trains,airplanes,bicycles,"
    "traffic,cities,architecture,painting,photography,movies,music theory,the piano,dance,fashion,museums,libraries,"
    "public speaking,leadership,teamwork,creativity,memory,happiness,fear,dreams,love,ethics,logic,probability,geometry,"
    "prime numbers,sorting algorithms,recursion,web servers,unit tests,version control,robots,space travel,the Moon,"
    "renewable energy,nuclear power,water,plastic,recycling,forests,bees".split(",")
)
_CODE = (
    "Explain what this code does.\n\n```python\n{}\n```",
    "Write docstrings for this code:\n\n```python\n{}\n```",
    "Find bugs in this code, and correct them.\n\n```python\n{}\n```",
    "Write tests for this code.\n\n```python\n{}\n```",
    "Complete the following code:\n\n```python\n{}\n```",
    "Add type hints and comments to this code:\n\n```python\n{}\n```",
    "Rewrite this code so that it is easier to read:\n\n```python\n{}\n```",
)
_TASKS = tuple(
    "reverses a string;counts the vowels in a text;checks whether a number is prime;computes the greatest common divisor;"
    "sorts a list with bubble sort;merges two sorted lists;finds the longest word in a sentence;removes duplicates from a "
    "list;computes Fibonacci numbers;reads a CSV file and prints its columns;parses a date;validates an email address;"
    "downloads a web page;counts words in a file;converts Celsius to Fahrenheit;computes a factorial;solves a quadratic "
    "equation;transposes a matrix;multiplies two matrices;finds the second largest number;checks for a palindrome;draws a "
    "bar chart;implements a stack;implements a queue;implements a binary search tree;searches a sorted list;flattens a "
    "nested list;groups words by their first letter;encrypts a text with a Caesar cipher;generates a random password;"
    "simulates a dice game;plays tic-tac-toe;computes a moving average;finds common elements of two lists;formats a table;"
    "writes a log file;renames all files in a folder;sends an email;connects to a database;caches results of a function;"
    "counts inversions;finds the shortest path in a graph;converts Roman numerals;computes the sum of digits;splits a list "
    "into chunks;checks balanced brackets;computes the median;implements a timer;converts JSON to XML;compares two files;"
    "computes compound interest;finds anagrams;rotates a list;computes Pascal's triangle;converts a number to binary;"
    "plays rock, paper, scissors;trains a linear regression;tokenizes a text;computes the edit distance;schedules tasks".split(
        ";"
    )
)
_LANGUAGES = ("Python", "Python", "Python", "Python", "JavaScript", "C", "Java", "Rust", "Bash", "SQL")
_PROGRAM = (
    "Write a {1} function that {0}.",
    "Write a {1} program that {0}, with comments.",
    "How do I write a {1} function that {0}? Explain each step.",
    "Write a {1} function that {0}, and tests for it.",
    "Complete this function, which {0}.\n\n```{1}\ndef solution(",
    "My {1} function {0}, but it is slow. How can I make it faster? Show code.",
)
_FOLLOW_UPS = (
    "Can you give an example?",
    "Make it shorter.",
    "Explain that in more detail.",
    "Rewrite your answer as a list.",
    "Now write it for a child.",
    "Translate your answer to Spanish.",
    "Are you sure? Check your answer.",
    "Summarize your answer in one sentence.",
    "What would be a counterargument?",
    "Write a poem about it.",
    "Why?",
    "Thank you. What should I read next?",
)


class Questions:
    """Numbered dialogues: question ``i`` depends on the documents, the seed and ``i`` only.

    Documents are used without repetition as long as their pool lasts.

    Raises:
        OptionError: the sources have no usable document.
    """

    def __init__(self, sources: Sequence[SourceSpec], exclude: Iterable[Path] = (), seed: int = 0) -> None:
        self._seed = seed
        self._excludes = Exclusion.from_files(exclude)
        pools: dict[str, dict[str, None]] = {name: {} for name in WEIGHTS}  # dictionaries: without copies, in order
        pools["code"] = dict.fromkeys(_TASKS)
        for source in sources:
            for document in read_source(source):
                _sort_in(document.text, pools, is_code=source.kind == "python")
        self._pools = {name: list(pool) for name, pool in pools.items() if pool}
        if self._pools.keys() == {"code"}:
            msg = "data: expected documents to ask questions about, found none; give other files"
            raise OptionError(msg)
        # Pools of successive dialogues, repeated endlessly.
        self._order = [name for name in self._pools for _ in range(WEIGHTS[name])]
        random.Random(f"{seed}/order").shuffle(self._order)  # noqa: S311 - not for secrets
        for name, pool in self._pools.items():
            random.Random(f"{seed}/{name}").shuffle(pool)  # noqa: S311 - not for secrets

    def __getitem__(self, number: int) -> list[str]:
        """Return the user's turns of dialogue ``number``, one or two; empty if they overlap with excluded text."""
        draw = random.Random(f"{self._seed}/{number}")  # noqa: S311 - not for secrets
        rounds, place = divmod(number, len(self._order))
        name = self._order[place]
        pool, earlier = self._pools[name], rounds * WEIGHTS[name] + self._order[:place].count(name)
        turns = _ask(name, pool[earlier % len(pool)], draw)
        if len(turns) == 1 and draw.random() < _SECOND_TURN:
            turns.append(draw.choice(_FOLLOW_UPS))
        return [] if any(self._excludes(turn) for turn in turns) else turns


def _sort_in(text: str, pools: dict[str, dict[str, None]], *, is_code: bool) -> None:
    """Add a document to the pools that it fits."""
    if is_code:
        pools["code"][text] = None
        return
    labels = {"Question: ": "math", "User: ": "chat", "Customer: ": "shop"}
    label = next((label for label in labels if text.startswith(label)), None)
    if label is not None:
        pools[labels[label]][text] = None
        return
    pools["topic"].update(dict.fromkeys(heading.strip() for heading in _HEADING.findall(text)))
    if len(text.split()) >= _MIN_DOCUMENT:
        pools["text"][text] = None


def _ask(pool: str, document: str, draw: random.Random) -> list[str]:
    """Return the user's turns about a document of a pool."""
    if pool == "topic":
        topic = draw.choice(_EVERYDAY) if draw.random() < _EVERYDAY_SHARE else document
        return [draw.choice(_TOPIC).format(topic)]
    if document in _TASKS:
        return [draw.choice(_PROGRAM).format(document, draw.choice(_LANGUAGES))]
    if pool in ("text", "code"):
        return [draw.choice(_TEXT if pool == "text" else _CODE).format(_excerpt(document, draw))]
    turns = user_turns(document)
    short = [turn for turn in turns if turn and len(turn.split()) <= _MAX_QUESTION]
    return short[: 2 if draw.random() < _SECOND_TURN else 1]


def _excerpt(text: str, draw: random.Random) -> str:
    """Return whole lines of the text, a log-uniform number of words, from a random line on."""
    words = round(_MIN_WORDS * (_MAX_WORDS / _MIN_WORDS) ** draw.random())
    lines = text.splitlines()
    start = draw.randrange(len(lines)) if draw.random() < 0.7 else 0
    if sum(len(line.split()) for line in lines[start:]) < min(words, _MIN_WORDS):
        start = 0
    taken: list[str] = []
    for line in lines[start:]:
        parts = line.split(" ")  # a line may be a long paragraph
        taken.append(" ".join(parts[:words]))
        words -= len(line.split())
        if words <= 0:
            break
    return "\n".join(taken).strip()
