import pytest
import torch
from torch import nn

from vitclinic._core.distributed import ALONE
from vitclinic.data import open_data
from vitclinic.tasks import Classification

evaluate = Classification().evaluate


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        return self.layer(x.flatten(1))


def test_against_a_loop_over_single_images():
    data, network = open_data("digits"), Linear()
    right = right_in_5 = 0
    nll = 0.0
    for index in range(len(data.test)):
        image = torch.from_numpy(data.test.read(torch.tensor([index]).numpy())[0]).permute(2, 0, 1)[None] / 255
        logits = network(image)[0].double()
        label = int(data.test.labels[index])
        ranking = logits.argsort(descending=True).tolist()
        right += ranking[0] == label
        right_in_5 += label in ranking[:5]
        nll += (logits.logsumexp(0) - logits[label]).item()
    score = evaluate(network, data, "test", ALONE)
    assert (score["correct"], score["accuracy_top5"], score["count"]) == (right, right_in_5 / 180, 180)
    assert score["nll"] == pytest.approx(nll / 180, rel=1e-6)


@pytest.mark.parametrize("batch_size", [1, 7, 180, 1000])
def test_any_batch_size_gives_the_same_counts(batch_size):
    data, network = open_data("digits"), Linear()
    assert (
        evaluate(network, data, "test", ALONE, batch_size)["correct"]
        == evaluate(network, data, "test", ALONE)["correct"]
    )


def test_the_network_is_left_in_its_mode():
    network = Linear().train()
    evaluate(network, open_data("digits"), "val", ALONE)
    assert network.training
