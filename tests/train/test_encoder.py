from pathlib import Path

from checkpoints import MakeCheckpoint
from pronk import LLM
from pronk.train.corpus.encoder import Encoder
from pronk.train.data import load_tokenizer
from pronk.train.teacher import Teacher

TALK = "User: What does it see?\n\nAssistant: The cat."


def test_target_sees_text_as_its_own_run_wrote_it(prepared: Path, teacher: Teacher) -> None:
    own = Encoder.of_run(load_tokenizer(prepared))
    target = teacher.encoder
    texts = ["def f(x):\n    return x", TALK, "a <|endoftext|> b <|user|>"]
    assert list(target.encode(texts)) == list(own.encode(texts))
    assert (target.end_id, target.vocab_size) == (own.end_id, own.vocab_size)
    assert target.fingerprint == teacher.llm.tokenizer.fingerprint
    assert 0 not in next(target.encode(texts[2:]))


def test_open_question_ends_where_the_answer_begins(teacher: Teacher) -> None:
    whole = teacher.encoder.encode_dialogue([("user", "Who?"), ("assistant", "I.")])
    asked = teacher.encoder.encode_dialogue([("user", "Who?")])
    assert asked == whole[: len(asked)]
    assert asked[-1] == teacher.llm.tokenizer.backend.token_to_id("<|assistant|>")


def test_target_without_a_chat_template_reads_dialogues_as_text(checkpoint: MakeCheckpoint) -> None:
    llm = LLM(checkpoint("llama"))
    encoder = Encoder.of_target(llm.tokenizer, llm.config)
    (ids,) = encoder.encode([TALK])
    assert llm.tokenizer.decode(ids) == TALK
    assert encoder.end_id == 0
