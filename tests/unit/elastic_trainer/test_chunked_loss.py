"""The loss in pieces beside torch's own over all rows at once."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from elastic_trainer.data import IGNORED
from elastic_trainer.parallel.tensor import LOSS_ROWS, token_loss_sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [LOSS_ROWS // 4, LOSS_ROWS // 2 + 3])
def test_loss_and_gradient_are_those_of_torch(dtype, length):
    """Of fewer rows than one piece, and of a piece and six rows more; some count nothing."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(2, length, 40, generator=generator)).to(dtype)
    targets = torch.randint(0, 40, (2, length), generator=generator)
    targets[0, :5] = targets[1, -4:] = IGNORED
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    before = logits.clone()
    loss = token_loss_sum(ours, targets, None)
    expected = F.cross_entropy(
        theirs.flatten(0, 1).float(), targets.flatten(), reduction="sum", ignore_index=IGNORED
    )
    (0.25 * loss).backward()
    (0.25 * expected).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert torch.equal(ours.detach(), before)
    assert ours.grad.dtype == dtype
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert not ours.grad[0, :5].any()


def test_without_a_target_the_loss_is_zero():
    logits = torch.randn(1, 3, 8, requires_grad=True)
    loss = token_loss_sum(logits, torch.full((1, 3), IGNORED), None)
    loss.backward()
    assert loss.item() == 0.0
    assert not logits.grad.any()
