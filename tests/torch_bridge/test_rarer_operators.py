"""Linear algebra, Fourier transforms, special functions, scatters and counts against torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.torch_bridge.oracle import assert_same_functions
from tests.torch_bridge.test_operators import seeded


def test_solves_and_factorisations_match_torch() -> None:
    a, b = seeded((2, 4, 4), (2, 4, 3))
    eye = torch.eye(4)
    a = a + 4 * eye

    def positive(a: torch.Tensor) -> torch.Tensor:
        return a @ a.mT + eye

    assert_same_functions(
        {
            "cholesky": lambda a, b: torch.linalg.cholesky(positive(a)),
            "cholesky upper": lambda a, b: torch.linalg.cholesky(positive(a), upper=True),
            "cholesky_solve": lambda a, b: torch.cholesky_solve(b, torch.linalg.cholesky(positive(a))),
            "cholesky_inverse": lambda a, b: torch.cholesky_inverse(torch.linalg.cholesky(positive(a))),
            "inv": lambda a, b: torch.linalg.inv(a),
            "det": lambda a, b: torch.linalg.det(a),
            "slogdet": lambda a, b: torch.linalg.slogdet(a).logabsdet,
            "solve": lambda a, b: torch.linalg.solve(a, b),
            "solve from the right": lambda a, b: torch.linalg.solve(a, b.mT, left=False),
            "solve a vector": lambda a, b: torch.linalg.solve(a, b[..., 0]),
            "solve_triangular": lambda a, b: torch.linalg.solve_triangular(a, b, upper=True),
            "solve_triangular from the right": lambda a, b: torch.linalg.solve_triangular(
                a, b.mT, upper=False, left=False
            ),
            "pinv": lambda a, b: torch.linalg.pinv(b),
            "eigvalsh": lambda a, b: torch.linalg.eigvalsh(positive(a)),
            "svdvals": lambda a, b: torch.linalg.svdvals(b),
            "qr": lambda a, b: torch.linalg.qr(b).R.abs(),
            "lu_solve": lambda a, b: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), b),
            "lu_solve from the right": lambda a, b: torch.linalg.lu_solve(
                *torch.linalg.lu_factor(a), b.mT, left=False
            ),
            "matrix_exp": lambda a, b: torch.linalg.matrix_exp(a / 4),
            "matrix_rank": lambda a, b: torch.linalg.matrix_rank(b),
        },
        [a, b],
        tolerance=1e-3,
    )


def test_fourier_transforms_match_torch_in_every_norm() -> None:
    (x,) = seeded((3, 4, 6))

    def real(z: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(z.resolve_conj())

    cases = {
        "fftfreq": lambda x: x * torch.fft.fftfreq(6, 0.5),
        "rfftfreq": lambda x: x * torch.fft.rfftfreq(10),
    }
    for norm in ("forward", "backward", "ortho"):
        cases |= {
            f"fft {norm}": lambda x, n=norm: real(torch.fft.fft(x, norm=n)),
            f"fft2 {norm}": lambda x, n=norm: real(torch.fft.fft2(x, norm=n)),
            f"ifft {norm}": lambda x, n=norm: real(torch.fft.ifft(x, norm=n)),
            f"rfftn {norm}": lambda x, n=norm: real(torch.fft.rfftn(x, norm=n)),
            f"irfft {norm}": lambda x, n=norm: torch.fft.irfft(torch.fft.rfft(x), norm=n),
            f"irfft2 {norm}": lambda x, n=norm: torch.fft.irfft2(torch.fft.rfft2(x) * (1 + 2j), norm=n),
            f"hfft {norm}": lambda x, n=norm: torch.fft.hfft(torch.fft.ihfft(x) * (1 + 2j), norm=n),
        }
    cases["odd length"] = lambda x: torch.fft.irfft(torch.fft.rfft(x), 5)
    cases["fftshift"] = lambda x: torch.fft.fftshift(x)
    assert_same_functions(cases, [x])


def _polynomial(name: str) -> Callable[..., torch.Tensor]:
    # torch has no gradient of these.
    return lambda x, degree: getattr(torch.special, name)(x.detach().abs(), degree.detach())


def test_orthogonal_polynomials_match_torch_at_every_degree() -> None:
    x = torch.linspace(-0.9, 0.9, 7)
    degree = torch.tensor([-1.0, 0.0, 1.0, 2.0, 3.0, 5.0, 8.0])
    names = """chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w
        shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v
        shifted_chebyshev_polynomial_w hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l
        legendre_polynomial_p""".split()
    cases = {name: _polynomial(name) for name in names}
    assert_same_functions(cases, [x, degree], tolerance=1e-3)


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
def test_products_at_shared_places_have_torchs_gradient_with_zeros_among_them() -> None:
    x = torch.tensor([1.5, 0.0, -2.0, 3.0])
    source = torch.tensor([2.0, 0.0, 3.0, 0.0, 0.0, 4.0])
    index = torch.tensor([0, 0, 1, 2, 2, 3])
    assert_same_functions(
        {
            "scatter_reduce": lambda x, s, i: x.scatter_reduce(0, i, s, "prod"),
            "without self": lambda x, s, i: x.scatter_reduce(0, i, s, "prod", include_self=False),
            "index_reduce": lambda x, s, i: x.index_reduce(0, i, s, "prod"),
            "mean": lambda x, s, i: x.index_reduce(0, i, s, "mean"),
        },
        [x, source, index],
    )


def test_writes_at_places_that_data_names_match_torch() -> None:
    x, source = seeded((3, 4), (12,))
    mask = torch.tensor([[True, False, True, True]] * 3)
    index = torch.tensor([[0, 5], [11, 2]])
    assert_same_functions(
        {
            "masked_scatter": lambda x, s, m, i: x.masked_scatter(m, s),
            "put": lambda x, s, m, i: x.put(i, s[:4].reshape(2, 2)),
            "put accumulate": lambda x, s, m, i: x.put(i, s[:4].reshape(2, 2), accumulate=True),
            "as_strided": lambda x, s, m, i: torch.as_strided(x, (2, 3), (3, 2), 1),
            "diagonal_scatter": lambda x, s, m, i: x.diagonal_scatter(s[:3], 1),
            "meshgrid of a scalar": lambda x, s, m, i: torch.meshgrid(s[0], s[:3], indexing="xy"),
            "nonzero_static": lambda x, s, m, i: torch.nonzero_static(m, size=10),
        },
        [x, source, mask, index],
    )


def test_counts_and_middles_match_torch() -> None:
    (x,) = seeded((4, 7))
    holes = x.clone()
    holes[0, 2] = holes[2, 5] = holes[2, 6] = torch.nan
    whole = torch.tensor([[3, 1, 1, 2, 2, 5, 0]] * 4)
    assert_same_functions(
        {
            "histc": lambda x, h, n: torch.histc(x.detach(), 5),
            "histc in a range": lambda x, h, n: torch.histc(x.detach(), 4, min=-1, max=1),
            "mode": lambda x, h, n: torch.mode(n, -1),
            "nanmedian": lambda x, h, n: torch.nanmedian(h),
            "nanmedian along a dim": lambda x, h, n: torch.nanmedian(h, 1),
        },
        [x, holes, whole],
    )


def test_bessel_functions_match_torch_near_and_far() -> None:
    x = torch.tensor([0.0, 1e-3, 0.1, 0.7, 1.0, 2.5, 5.0, 9.0, 20.0, 24.9, 25.1, 40.0])
    names = """bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_k0 modified_bessel_k1
        scaled_modified_bessel_k0 scaled_modified_bessel_k1""".split()
    assert_same_functions(
        {name: (lambda x, name=name: getattr(torch.special, name)(x.detach())) for name in names},
        [x],
        tolerance=1e-4,
    )


def test_erfcx_matches_torch_where_its_factors_overflow() -> None:
    x = torch.tensor([-3.0, -0.5, 0.0, 0.3, 2.0, 9.0, 12.0, 80.0])
    assert_same_functions({"erfcx": torch.special.erfcx}, [x])


def test_polygamma_keeps_its_digits_at_negative_numbers() -> None:
    x = torch.tensor([-8.4784, -3.3, -1.2, 0.3, 2.0, 15.0])
    assert_same_functions(
        {f"polygamma {n}": (lambda x, n=n: torch.polygamma(n, x)) for n in (0, 1, 2, 3)},
        [x],
        tolerance=1e-4,
    )


def test_pooling_over_uneven_windows_matches_torch() -> None:
    x, cube = seeded((2, 3, 7, 9), (2, 2, 5, 6, 7))
    share = torch.rand(2, 3, 2, generator=torch.Generator().manual_seed(1))
    share3 = torch.rand(2, 2, 3, generator=torch.Generator().manual_seed(2))
    pool2, pool3 = torch.nn.functional.adaptive_max_pool2d, torch.nn.functional.adaptive_max_pool3d
    aten = torch.ops.aten
    assert_same_functions(
        {
            "adaptive": lambda x, c, a, b: pool2(x, (3, 4), return_indices=True),
            "adaptive of a cube": lambda x, c, a, b: pool3(c, (2, 4, 3), return_indices=True),
            "fractional": lambda x, c, a, b: aten.fractional_max_pool2d(x, [2, 3], [4, 5], a.detach()),
            "fractional of a cube": lambda x, c, a, b: aten.fractional_max_pool3d(
                c, [2, 2, 3], [3, 4, 1], b.detach()
            ),
        },
        [x, cube, share, share3],
    )


def test_margin_losses_match_torch_in_every_reduction() -> None:
    a, b = seeded((5, 4), (5, 4))
    target = torch.tensor([[1.0, -1.0, -1.0, 1.0]] * 5)
    functional = torch.nn.functional
    cases = {}
    for way in ("none", "mean", "sum"):
        cases |= {
            f"ranking {way}": lambda a, b, t, way=way: functional.margin_ranking_loss(
                a, b, t.detach(), 0.3, reduction=way
            ),
            f"hinge {way}": lambda a, b, t, way=way: functional.hinge_embedding_loss(
                a, t.detach(), 0.5, reduction=way
            ),
        }
    assert_same_functions(cases, [a, b, target])


def test_unpooling_overlapping_windows_gives_every_value_the_gradient() -> None:
    (x,) = seeded((2, 3, 6, 6))
    functional = torch.nn.functional

    def round_trip(x: torch.Tensor) -> torch.Tensor:
        values, places = functional.max_pool2d(x, 3, stride=1, return_indices=True)
        return functional.max_unpool2d(values, places, (3, 3), stride=(1, 1))

    assert_same_functions({"overlapping": round_trip}, [x])


def test_negative_padding_cuts_what_positive_padding_has_made() -> None:
    (x,) = seeded((2, 3, 6))
    functional = torch.nn.functional
    assert_same_functions(
        {
            "replicate": lambda x: functional.pad(x, (-6, 8), "replicate"),
            "reflect": lambda x: functional.pad(x, (-2, 3), "reflect"),
        },
        [x],
    )


def test_reductions_of_segments_match_torch_empty_ones_and_zeros_included() -> None:
    x = torch.tensor([[1.5, 0.0], [0.0, -2.0], [3.0, 1.0], [2.0, 4.0], [-1.0, 0.5]])
    lengths, offsets = torch.tensor([0, 2, 3, 0]), torch.tensor([0, 0, 2, 5, 5])
    nested = torch.tensor([[2], [1], [0], [2], [1]])
    cases = {}
    for way in ("sum", "mean", "prod", "max", "min"):
        cases |= {
            f"{way} by lengths": lambda x, n, o, k, way=way: torch.segment_reduce(
                x, way, lengths=n, axis=0, initial=1.0
            ),
            f"{way} by offsets": lambda x, n, o, k, way=way: torch.segment_reduce(
                x, way, offsets=o, axis=0, initial=2.0
            ),
            f"{way} in rows": lambda x, n, o, k, way=way: torch.segment_reduce(
                x, way, lengths=k, axis=1, unsafe=True
            ),
        }
    assert_same_functions(cases, [x, lengths, offsets, nested])


def test_values_put_at_the_true_places_of_a_mask_match_torch() -> None:
    x, values = seeded((3, 4, 2), (4, 2))
    rows = torch.tensor([True, False, True])
    places = torch.tensor([[True, False, False, True], [False] * 4, [False, True, True, False]])

    def put(*index: str, value: str = "v", accumulate: bool = False) -> Callable[..., torch.Tensor]:
        def call(x: torch.Tensor, v: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            named = {"rows": rows, "places": places, ":": None}
            chosen = {"v": v, "one": v[0, 0], "row": v[:1], "two": v[:2, None]}[value]
            return torch.ops.aten.index_put(x, [named[name] for name in index], chosen, accumulate)

        return call

    assert_same_functions(
        {
            "a value a place": put("places"),
            "a value a place, added": put("places", accumulate=True),
            "one value": put("places", value="one"),
            "one row": put("places", value="row"),
            "rows": put("rows", value="two"),
        },
        [x, values, rows, places],
    )


def test_eigenvectors_have_torchs_gradient_where_phases_do_not_matter() -> None:
    (x,) = seeded((2, 4, 4))

    def invariant(x: torch.Tensor) -> list[torch.Tensor]:
        values, vectors = torch.linalg.eig(x)
        order = values.abs().argsort(-1, descending=True)
        values = values.gather(-1, order)
        projectors = torch.einsum("bij,bkj->bjik", vectors, vectors.conj())
        return [values.abs(), projectors.sum(1).real]

    assert_same_functions({"eig": invariant}, [x], tolerance=1e-3)


def test_sampling_and_antialiased_resampling_match_torch() -> None:
    x, grid, image = seeded((2, 3, 4, 5, 6), (2, 2, 3, 2, 3), (2, 3, 9, 11))
    cases = {}
    for mode in ("bilinear", "nearest"):
        for padding in ("zeros", "border", "reflection"):
            for corners in (True, False):
                cases[f"{mode} {padding} {corners}"] = (
                    lambda x, g, i, mode=mode, padding=padding, corners=corners: (
                        torch.nn.functional.grid_sample(x, 1.5 * g, mode, padding, align_corners=corners)
                    )
                )
    for mode in ("bilinear", "bicubic"):
        for size in ((4, 5), (20, 13)):
            cases[f"{mode} to {size}"] = lambda x, g, i, mode=mode, size=size: (
                torch.nn.functional.interpolate(i, size, mode=mode, antialias=True)
            )
        cases[f"{mode} by a factor"] = lambda x, g, i, mode=mode: torch.nn.functional.interpolate(
            i, scale_factor=0.4, mode=mode, antialias=True
        )
        cases[f"{mode} at corners"] = lambda x, g, i, mode=mode: torch.nn.functional.interpolate(
            i, (5, 4), mode=mode, antialias=True, align_corners=True
        )
    assert_same_functions(cases, [x, grid, image])


def test_counts_over_a_grid_match_torch() -> None:
    x, weight = seeded((12, 2), (12,))
    edges = torch.tensor([-2.0, -0.5, 0.1, 1.5])
    assert_same_functions(
        {
            "counts": lambda x, w, e: _flat(torch.histogramdd(x.detach(), [3, 2])),
            "in a range": lambda x, w, e: _flat(
                torch.histogramdd(
                    x.detach(), [2, 4], range=[-1.0, 1.0, -2.0, 0.5], weight=w.detach().abs(), density=True
                )
            ),
            "between edges": lambda x, w, e: torch.histogramdd(x.detach(), [e.detach(), e.detach()[1:]]).hist,
            "of one value": lambda x, w, e: list(torch.histogram(x.detach()[0, :1], 2)),
        },
        [x, weight, edges],
    )


def _flat(result: Any) -> list[torch.Tensor]:
    return [result.hist, *result.bin_edges]


def test_the_airy_function_matches_torch_on_every_contour() -> None:
    x = torch.tensor([-60.0, -9.0, -5.1, -4.9, -2.3, -0.4, 0.0, 0.9, 1.1, 2.0, 6.0, 12.0])
    assert_same_functions({"airy_ai": lambda x: torch.special.airy_ai(x.detach())}, [x])


def test_a_linear_layers_loss_in_chunks_matches_torch() -> None:
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if options is None:
        pytest.skip("this torch has no linear_cross_entropy")
    x, weight, bias, classes = seeded((7, 4), (5, 4), (5,), (5,))
    target = torch.tensor([0, 4, -100, 2, 2, 1, -100])
    cases = {}
    for way in ("mean", "sum", "none"):
        cases[way] = lambda x, w, b, c, t, way=way: torch.nn.functional.linear_cross_entropy(
            x,
            w,
            t,
            linear_bias=b,
            weight=c.detach().abs(),
            reduction=way,
            options=options(batch_chunk_size=3, allow_retain_graph=True),
        )
    assert_same_functions(cases, [x, weight, bias, classes, target])
