import pytest
import torch

from checkpoints import MakeCheckpoint
from pronk import SamplingParams
from pronk.train.attention import DenseAttention, dense_logits
from pronk.train.lm import LanguageModel
from pronk.train.loop import Trainer
from pronk.train.teacher import Teacher


def test_tokens_see_their_own_past_only(trained: Trainer[LanguageModel]) -> None:
    tokens = torch.randint(4, 320, (3, 20), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[1, 12:] = 5
    before, after = (
        dense_logits(trained.objective.module, t).view(3, 20, -1).detach()
        for t in (tokens, changed)
    )
    torch.testing.assert_close(after[1, :12], before[1, :12])
    torch.testing.assert_close(after[[0, 2]], before[[0, 2]])
    assert not torch.allclose(after[1, 12:], before[1, 12:])


def test_windows_hide_what_is_further_back() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2 * 10, 2, 8, generator=generator) for _ in range(3))
    attend = DenseAttention(2, 10, (3, None, 10))
    before = [attend(layer, q, k, v).view(2, 10, -1) for layer in range(3)]
    changed = k.clone()
    changed[4] += 1
    after = [attend(layer, q, changed, v).view(2, 10, -1) for layer in range(3)]
    seen = [
        [i for i in range(10) if not torch.equal(a[0, i], b[0, i])]
        for a, b in zip(before, after, strict=True)
    ]
    assert seen == [[4, 5, 6], [4, 5, 6, 7, 8, 9], [4, 5, 6, 7, 8, 9]]
    assert all(torch.equal(a[1], b[1]) for a, b in zip(before, after, strict=True))
    torch.testing.assert_close(before[1], before[2])


@pytest.mark.parametrize(
    ("family", "more"),
    [("llama", {}), ("gpt2", {}), ("mistral", {"sliding_window": 16}), ("qwen3", {})],
)
def test_teaching_pass_is_the_engine_s_pass(
    family: str, more: dict[str, int], checkpoint: MakeCheckpoint
) -> None:
    teacher = Teacher(checkpoint(family, **more), threads=1)
    assert (teacher.dtype, teacher.llm.engine.exact) == (torch.float32, True)
    ids = torch.randint(4, 300, (2, 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ours = dense_logits(teacher.decoder, ids).log_softmax(-1).view(2, 40, -1)
    for row, logprobs in zip(ids.tolist(), ours, strict=True):
        engine = teacher.llm.generate(
            row, SamplingParams(max_tokens=1, prompt_logprobs=0)
        ).prompt_logprobs
        assert engine is not None
        for i in range(1, 40):
            assert (engine[i] or {})[row[i]] == pytest.approx(
                float(logprobs[i - 1, row[i]]), abs=1e-3
            )
