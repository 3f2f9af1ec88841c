import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pronk.train import distill
from pronk.train.distill import Comparison, chunk_rows, compare, distillation_loss
from pronk.train.text_loss import text_loss

ROWS, SIZE, VOCAB = 50, 6, 40


@pytest.fixture
def tensors(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Chunks of 16 rows, so that the last one is not full."""
    monkeypatch.setattr(distill, "_CHUNK", 16 * VOCAB)
    monkeypatch.setattr(distill, "_ROWS", 1)
    g = torch.Generator().manual_seed(3)
    return {
        "hidden": torch.randn(ROWS, SIZE, generator=g, dtype=torch.float64),
        "weight": torch.randn(VOCAB, SIZE, generator=g, dtype=torch.float64),
        "teacher": 2 * torch.randn(ROWS, VOCAB, generator=g, dtype=torch.float64),
        "labels": torch.randint(VOCAB, (ROWS,), generator=g),
    }


def reference(hidden: Tensor, weight: Tensor, teacher: Tensor, labels: Tensor, hard: float) -> Tensor:
    log_q = (hidden @ weight.T).log_softmax(-1)
    soft = F.kl_div(log_q, teacher.log_softmax(-1), reduction="batchmean", log_target=True)
    return (1 - hard) * soft + hard * F.nll_loss(log_q, labels)


@pytest.mark.parametrize("hard", [0.0, 0.3, 1.0])
def test_loss_and_gradients_are_those_of_the_whole_logits(tensors: dict[str, Tensor], hard: float) -> None:
    values, grads = [], []
    for ours in (True, False):
        h, w = (tensors[name].clone().requires_grad_() for name in ("hidden", "weight"))
        if ours:
            teacher = tensors["teacher"].__getitem__
            loss = distillation_loss(h, w, teacher, tensors["labels"], hard, torch.float64)
        else:
            loss = reference(h, w, tensors["teacher"], tensors["labels"], hard)
        (3 * loss).backward()
        assert h.grad is not None
        assert w.grad is not None
        values.append(loss.detach())
        grads.append((h.grad, w.grad))
    torch.testing.assert_close(values[0], values[1])
    torch.testing.assert_close(grads[0], grads[1])


def test_teacher_is_asked_for_one_chunk_at_a_time(tensors: dict[str, Tensor]) -> None:
    asked: list[int] = []

    def teacher(part: slice) -> Tensor:
        asked.append(part.stop - part.start)
        return tensors["teacher"][part]

    distillation_loss(tensors["hidden"], tensors["weight"], teacher, tensors["labels"])
    assert chunk_rows(VOCAB) == 16
    assert asked == [16, 16, 16, 2]


def test_large_vocabularies_go_by_few_rows() -> None:
    assert chunk_rows(4096) >= 256
    assert 64 <= chunk_rows(150_000) <= 256


def test_student_that_is_the_teacher_has_no_loss(tensors: dict[str, Tensor]) -> None:
    h, w = tensors["hidden"].clone().requires_grad_(), tensors["weight"]
    same = h.detach() @ w.T
    loss = distillation_loss(h, w, same.__getitem__, tensors["labels"], 0.0, torch.float64)
    loss.backward()
    assert h.grad is not None
    assert abs(float(loss.detach())) < 1e-12
    assert float(h.grad.abs().max()) < 1e-12


def test_comparison_sums_over_chunks(tensors: dict[str, Tensor]) -> None:
    sums = Comparison()
    teacher = tensors["hidden"] @ tensors["weight"].T
    teacher[7:] = tensors["teacher"][7:]
    compare(tensors["hidden"], tensors["weight"], teacher.__getitem__, sums, torch.float64)
    logits = tensors["hidden"] @ tensors["weight"].T
    expected = reference(tensors["hidden"], tensors["weight"], teacher, tensors["labels"], 0.0)
    assert sums.rows == ROWS
    assert sums.divergence / sums.rows == pytest.approx(float(expected))
    assert sums.same == int((logits.argmax(-1) == teacher.argmax(-1)).sum())
    assert 7 <= sums.same < ROWS


@pytest.mark.parametrize("which", ["distillation", "text"])
def test_without_gradients_none_are_computed(
    which: str, tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    h, w = (tensors[name].clone().requires_grad_() for name in ("hidden", "weight"))
    room: list[object] = []
    empty_like = torch.empty_like
    # Room for the gradient of the states is made first.
    monkeypatch.setattr(torch, "empty_like", lambda x: room.append(x.dtype) or empty_like(x))

    def loss() -> float:
        room.clear()
        if which == "text":
            return float(text_loss(h, w, tensors["labels"], torch.float64)[0].detach())
        teacher = tensors["teacher"].__getitem__
        return float(distillation_loss(h, w, teacher, tensors["labels"], 0.3, torch.float64).detach())

    expected = loss()
    assert torch.float64 in room
    with torch.no_grad():
        assert loss() == expected
    assert torch.float64 not in room
