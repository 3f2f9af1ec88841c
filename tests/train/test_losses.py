from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pronk.train import losses
from pronk.train.losses import Comparison, chunks, distillation_loss, text_loss

ROWS = 50
SIZE = 6
VOCAB = 40

Loss = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture
def tensors(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Return random float64 inputs of the losses; chunks have 16 rows, and the last chunk has
    fewer.
    """
    monkeypatch.setattr(losses, "product_dtype", lambda _: torch.float64)
    monkeypatch.setattr(losses, "_MAX_LOGITS", 16 * VOCAB)
    monkeypatch.setattr(losses, "_MIN_ROWS", 1)
    g = torch.Generator().manual_seed(3)
    return {
        "hidden": torch.randn(ROWS, SIZE, generator=g, dtype=torch.float64),
        "weight": torch.randn(VOCAB, SIZE, generator=g, dtype=torch.float64),
        "teacher": 2 * torch.randn(ROWS, VOCAB, generator=g, dtype=torch.float64),
        "labels": torch.randint(VOCAB, (ROWS,), generator=g),
    }


def both_losses(tensors: dict[str, Tensor], hard: float | None) -> tuple[Loss, Loss]:
    """Return the library's loss (``text_loss`` if ``hard`` is ``None``), and the same from whole
    logits.
    """
    teacher = tensors["teacher"]
    labels = tensors["labels"]

    def ours(h: Tensor, w: Tensor) -> Tensor:
        if hard is None:
            return text_loss(h, w, labels)[0]
        return distillation_loss(h, w, teacher.__getitem__, labels, hard)

    def whole(h: Tensor, w: Tensor) -> Tensor:
        log_q = (h @ w.T).log_softmax(-1)
        share = 1.0 if hard is None else hard
        soft = F.kl_div(log_q, teacher.log_softmax(-1), reduction="batchmean", log_target=True)
        return (1 - share) * soft + share * F.nll_loss(log_q, labels)

    return ours, whole


@pytest.mark.parametrize("hard", [0.0, 0.3, 1.0, None])
def test_loss_and_gradients_are_those_of_the_whole_logits(
    tensors: dict[str, Tensor], hard: float | None
) -> None:
    found = []
    for loss in both_losses(tensors, hard):
        h, w = (tensors[name].clone().requires_grad_() for name in ("hidden", "weight"))
        value = loss(h, w)
        (3 * value).backward()
        found.append((value.detach(), h.grad, w.grad))
    torch.testing.assert_close(*found)


def test_teacher_is_asked_for_one_chunk_at_a_time(tensors: dict[str, Tensor]) -> None:
    asked: list[int] = []

    def teacher(part: slice) -> Tensor:
        asked.append(part.stop - part.start)
        return tensors["teacher"][part]

    distillation_loss(tensors["hidden"], tensors["weight"], teacher, tensors["labels"])
    assert asked == [16, 16, 16, 2]


def test_large_vocabularies_go_by_few_rows() -> None:
    assert chunks(10_000, 4096)[0].stop >= 256
    assert 64 <= chunks(10_000, 150_000)[0].stop <= 256


def test_student_that_is_the_teacher_has_no_loss(tensors: dict[str, Tensor]) -> None:
    h = tensors["hidden"].clone().requires_grad_()
    w = tensors["weight"]
    tensors["teacher"] = h.detach() @ w.T
    loss = both_losses(tensors, 0.0)[0](h, w)
    loss.backward()
    assert h.grad is not None
    assert abs(float(loss.detach())) < 1e-12
    assert float(h.grad.abs().max()) < 1e-12


def test_comparison_sums_over_chunks(tensors: dict[str, Tensor]) -> None:
    sums = Comparison()
    logits = tensors["hidden"] @ tensors["weight"].T
    tensors["teacher"][:7] = logits[:7]
    arguments = (
        tensors["hidden"],
        tensors["weight"],
        tensors["teacher"].__getitem__,
        tensors["labels"],
    )
    distillation_loss(*arguments, into=sums)
    _, whole = both_losses(tensors, 0.0)
    assert sums.rows == ROWS
    assert sums.divergence / sums.rows == pytest.approx(
        float(whole(tensors["hidden"], tensors["weight"]))
    )
    assert sums.same == int((logits.argmax(-1) == tensors["teacher"].argmax(-1)).sum())
    assert 7 <= sums.same < ROWS


@pytest.mark.parametrize("hard", [0.3, None])
def test_without_gradients_none_are_computed(
    hard: float | None, tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    h, w = (tensors[name].clone().requires_grad_() for name in ("hidden", "weight"))
    loss, _ = both_losses(tensors, hard)
    room: list[object] = []
    empty_like = torch.empty_like
    # The loss allocates the gradient of ``h`` by empty_like, if a gradient is needed.
    monkeypatch.setattr(torch, "empty_like", lambda x: room.append(x.dtype) or empty_like(x))
    expected = float(loss(h, w).detach())
    assert torch.float64 in room
    room.clear()
    with torch.no_grad():
        assert float(loss(h, w)) == expected
    assert torch.float64 not in room


def test_rows_have_their_weights(tensors: dict[str, Tensor]) -> None:
    """The gradients are those of the weighted mean, and rows of weight 0 have none."""
    weights = torch.linspace(0.0, 2.0, ROWS, dtype=torch.float64)
    teacher = tensors["teacher"]

    def ours(h: Tensor, w: Tensor) -> Tensor:
        labels = tensors["labels"]
        return distillation_loss(h, w, teacher.__getitem__, labels, row_weights=weights)

    def whole(h: Tensor, w: Tensor) -> Tensor:
        divergences = F.kl_div(
            (h @ w.T).log_softmax(-1), teacher.log_softmax(-1), reduction="none", log_target=True
        )
        return (weights * divergences.sum(-1)).mean()

    found = []
    for loss in (ours, whole):
        h, w = (tensors[name].clone().requires_grad_() for name in ("hidden", "weight"))
        value = loss(h, w)
        value.backward()
        assert h.grad is not None
        assert not h.grad[0].any()
        found.append((value.detach(), h.grad, w.grad))
    torch.testing.assert_close(*found)
