import torch

from agentcache.engine.linear_layout import lay_out_for_few_rows


class Model(torch.nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 24, dtype=dtype)
        self.inner = torch.nn.Linear(24, 40, dtype=dtype)
        self.outer = torch.nn.Linear(40, 24, bias=False, dtype=dtype)
        self.head = torch.nn.Linear(24, 50, bias=False, dtype=dtype)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.outer(self.inner(self.embedding(ids))))


def test_linear_weights_lie_transposed_and_say_the_same() -> None:
    torch.manual_seed(0)
    model = Model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids = torch.randint(0, 50, (9,))
    expected = model(ids)
    lay_out_for_few_rows(model)
    for layer in (model.inner, model.outer):
        assert layer.weight.t().is_contiguous()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    torch.testing.assert_close(model(ids), expected)


def test_a_tied_embedding_is_left_alone() -> None:
    model = Model()
    lay_out_for_few_rows(model)
    assert model.embedding.weight.is_contiguous()
    assert model.head.weight is model.embedding.weight


def test_other_dtypes_are_left_alone() -> None:
    model = Model(torch.bfloat16)
    lay_out_for_few_rows(model)
    assert model.inner.weight.is_contiguous()
