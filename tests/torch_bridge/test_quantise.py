"""Fake quantisation against torch: values, and gradients inside and outside the range."""

import torch

from tests.torch_bridge.oracle import assert_same_functions


def test_fake_quantisation_rounds_and_passes_gradients_as_torch_does() -> None:
    torch.manual_seed(0)
    x, scales = torch.randn(3, 4, 5), torch.tensor([0.01, 0.02, 0.5, 0.007])
    zeros, one = torch.tensor([0, 3, -5, 100], dtype=torch.int32), torch.tensor([0.013])
    assert_same_functions(
        {
            "of a tensor": lambda x, s: torch.fake_quantize_per_tensor_affine(x, 0.011, 7, -128, 127),
            "by tensors": lambda x, s: torch.fake_quantize_per_tensor_affine(
                x, one, torch.tensor([3], dtype=torch.int32), 0, 15
            ),
            "of channels": lambda x, s: torch.fake_quantize_per_channel_affine(
                x, s.detach(), zeros, 1, -128, 127
            ),
            "half to even": lambda x, s: torch.fake_quantize_per_tensor_affine(
                torch.arange(-5, 6) / 2 + 0 * x.sum(), 1.0, 0, -2, 2
            ),
        },
        [x, scales],
    )
